// A team of threads that runs one operation at a time. The caller is one of them.
//
// Each thread begins with a run of units of its own and then helps the others with theirs. Units are claimed one after another from
// counters that carry the number of the operation, and the caller waits for finished units, never for threads: a thread that the
// system has suspended costs at most the unit it holds. Threads spin for a moment when there is nothing to do, then sleep.
#pragma once
#include "kernels.h"

namespace inferflow {

class Pool {
 public:
  explicit Pool(int threads);  // in all, the caller's included
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs all units of one operation and returns when they are done. One caller at a time.
  void run(const Kernel& kernel, const void* args, const Step& step);
  int threads() const { return threads_; }

 private:
  struct Team;
  int threads_;
  Team* team_;
};

}  // namespace inferflow
