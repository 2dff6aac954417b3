#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace inferflow {

uint8_t* Scratch::get(size_t bytes) {
  if (bytes > size) {
    free(data);
    size = (bytes + 4095) / 4096 * 4096;
    data = static_cast<uint8_t*>(aligned_alloc(4096, size));
    if (!data) abort();  // the caller has bounded what it asks for
  }
  return data;
}
Scratch::~Scratch() { free(data); }

namespace {

constexpr int SPINS = 20000;      // about half a millisecond: longer than the pause between two steps
constexpr int IMPATIENCE = 4000;  // spins after which a waiting caller lets others have its processor

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr uint64_t UNIT_BITS = 32, UNIT_MASK = (uint64_t{1} << UNIT_BITS) - 1;

}  // namespace

// Units that follow one another, each thread's own to begin with: it walks through memory in order, and nobody else touches its
// counters until he has nothing left of his own.
struct alignas(64) Range {
  std::atomic<uint64_t> next{0};  // operation number << 32 | first unit nobody has claimed
  std::atomic<uint64_t> done{0};  // finished units of this operation
};

// What the threads share. It is left behind, never freed, in a forked child: its threads are not there.
struct Pool::Team {
  // The operation. Written only while all units of the last one are done, so whoever claims a unit of it has read it whole.
  std::atomic<const Kernel*> kernel{nullptr};
  std::atomic<const void*> args{nullptr};
  std::atomic<const Step*> step{nullptr};
  std::atomic<uint64_t> units{0};  // operation number << 32 | how many: a latecomer must not take the next operation's for his own
  alignas(64) std::atomic<uint64_t> number{0};  // of the operation
  alignas(64) std::atomic<uint32_t> bell{0};    // rung for sleepers
  std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stop{false};
  std::vector<Scratch> scratch;
  std::vector<Range> ranges;
  std::vector<std::thread> threads;
  pid_t pid = getpid();

  explicit Team(int count) : scratch(count), ranges(count) {
    for (int n = 1; n < count; n++) threads.emplace_back([this, n] { serve(n); });
  }

  ~Team() {
    stop = true;
    bell++;
    bell.notify_all();
    for (auto& thread : threads) thread.join();
  }

  // Runs units of operation `now`, own ones first, until none is left to claim.
  void work(uint64_t now, size_t self) {
    const Kernel* op = kernel.load(std::memory_order_relaxed);
    const void* what = args.load(std::memory_order_relaxed);
    const Step* where = step.load(std::memory_order_relaxed);
    const uint64_t tagged = units.load(std::memory_order_relaxed), count = tagged & UNIT_MASK, teams = ranges.size();
    if (tagged >> UNIT_BITS != now) return;
    for (size_t n = 0; n < teams; n++) {
      const size_t owner = (self + n) % teams;
      Range& range = ranges[owner];
      const uint64_t end = count * (owner + 1) / teams;
      uint64_t ticket = range.next.load(std::memory_order_acquire);
      while (ticket >> UNIT_BITS == now && (ticket & UNIT_MASK) < end) {
        if (!range.next.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
        const uint64_t unit = ticket & UNIT_MASK;
        op->run(what, *where, unit, unit + 1, scratch[self]);
        range.done.fetch_add(1, std::memory_order_release);
        ticket = range.next.load(std::memory_order_acquire);
      }
    }
  }

  void serve(int n) {
    uint64_t seen = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      const uint64_t now = number.load(std::memory_order_acquire);
      if (now != seen) {
        work(now, n);
        seen = now;
        continue;
      }
      wait(seen);
    }
  }

  // Until there is an operation other than `seen`.
  void wait(uint64_t seen) {
    for (int spin = 0; spin < SPINS; spin++) {
      if (number.load(std::memory_order_acquire) != seen || stop.load(std::memory_order_relaxed)) return;
      pause();
    }
    sleepers++;
    const uint32_t before = bell.load();
    if (number.load() == seen && !stop.load()) bell.wait(before);
    sleepers--;
  }

  void run(const Kernel& op, const void* what, const Step& where, uint64_t count) {
    kernel.store(&op, std::memory_order_relaxed);
    args.store(what, std::memory_order_relaxed);
    step.store(&where, std::memory_order_relaxed);
    const uint64_t now = (number.load(std::memory_order_relaxed) + 1) & UNIT_MASK;
    units.store(now << UNIT_BITS | count, std::memory_order_relaxed);
    for (size_t n = 0; n < ranges.size(); n++) {
      ranges[n].done.store(0, std::memory_order_relaxed);
      ranges[n].next.store(now << UNIT_BITS | count * n / ranges.size(), std::memory_order_release);
    }
    number.store(now);
    if (sleepers.load()) {
      bell++;
      bell.notify_all();
    }
    work(now, 0);
    for (int spin = 0; finished() < count; spin++)
      if (spin < IMPATIENCE) pause();
      else sched_yield();
  }

  uint64_t finished() const {
    uint64_t all = 0;
    for (const Range& range : ranges) all += range.done.load(std::memory_order_acquire);
    return all;
  }
};

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), team_(new Team(threads_)) {}

Pool::~Pool() {
  if (team_->pid == getpid()) delete team_;
}

void Pool::run(const Kernel& kernel, const void* args, const Step& step) {
  if (team_->pid != getpid()) team_ = new Team(threads_);  // after a fork
  const int64_t count = kernel.units(args, step);
  if (count <= 0) return;
  if (count == 1 || threads_ == 1)
    kernel.run(args, step, 0, count, team_->scratch[0]);
  else
    team_->run(kernel, args, step, static_cast<uint64_t>(count));
}

}  // namespace inferflow
