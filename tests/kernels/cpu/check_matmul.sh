#!/bin/sh
# The matrix kernels' checks, for every instruction set that this machine runs or emulates. Needs g++; SIMDe (libsimde-dev) for
# AVX-512; aarch64-linux-gnu-g++ and qemu-aarch64 for NEON. Arguments choose: portable avx2 sanitized avx512 avx512vnni neon dotprod.
set -e
here=$(dirname "$0")
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT
flags="-std=c++20 -ffp-contract=off -fno-math-errno -w -I$here/../../../inferflow/kernels/cpu"
for isa in ${*:-portable avx2 sanitized avx512 avx512vnni neon dotprod}; do
  compiler=g++ runner=
  case $isa in
    portable) own=-O3 ;;
    avx2) own="-O3 -mavx2 -mfma -mf16c" ;;
    sanitized) own="-O1 -mavx2 -mfma -mf16c -fsanitize=address,undefined -fno-sanitize-recover=undefined" ;;
    avx512) own="-O1 -include $here/emulated_avx512.h" ;;
    avx512vnni) own="-O1 -include $here/emulated_avx512.h -DEMULATE_VNNI" ;;
    neon) own="-O2 -static" compiler=aarch64-linux-gnu-g++ runner=qemu-aarch64 ;;
    dotprod) own="-O2 -static -march=armv8.2-a+dotprod" compiler=aarch64-linux-gnu-g++ runner=qemu-aarch64 ;;
    *) echo "no such instruction set: $isa" >&2; exit 2 ;;
  esac
  $compiler $flags $own "$here/matmul_bench.cpp" -o "$out/$isa" -lpthread
  printf '%s: ' "$isa"
  $runner "$out/$isa" check
done
