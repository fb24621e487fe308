#!/usr/bin/env bash
# Compiles the C and C++ programs of this folder against an installed copy of the library, and runs them: plainly, linked
# statically, under AddressSanitizer and under valgrind.
#
# capi/check.sh FOLDER [OPTION]     FOLDER has libinstep.so, libinstep.a and, for the comparison with replay, instep
#   --tsan                          under ThreadSanitizer alone, which the library must be built with
set -euo pipefail
[ $# -ge 1 ] || { sed -n 's/^# \(capi.*\)/\1/p' "$0" >&2; exit 2; }
folder=$(realpath "$1")
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
./install.sh "$scratch/prefix" "$folder"
export PKG_CONFIG_PATH=$scratch/prefix/lib/pkgconfig
if command -v pkg-config >/dev/null; then
    compile_options=$(pkg-config --cflags instep) link_options=$(pkg-config --libs instep)
else
    compile_options="-I$scratch/prefix/include" link_options="-L$scratch/prefix/lib -linstep"
fi
version=$(sed -n 's/^Version: //p' "$PKG_CONFIG_PATH/instep.pc")
export LD_LIBRARY_PATH=$scratch/prefix/lib

programs=(examples/{step_bucket,clip_buckets,train,borrowed}.c examples/ranks.cpp
    tests/{misuse,settings,threads,replay,unload}.c tests/throws.cpp)
all=$(ls examples/*.c* tests/*.c* | wc -l)
[ "$all" = ${#programs[@]} ] || { echo "$all programs, of which ${#programs[@]} are run: name the others" >&2; exit 1; }

# NAME, and options of the compiler: makes $scratch/NAME/PROGRAM of each of `programs`
compile() {
    local made=$scratch/$1 source compiler
    shift
    mkdir -p "$made"
    for source in "${programs[@]}"; do
        case $source in
        *.c) compiler="${CC:-cc} -std=c11 -D_GNU_SOURCE" ;;
        *.cpp) compiler="${CXX:-c++} -std=c++17" ;;
        esac
        # shellcheck disable=SC2086 # lists of options
        $compiler -Wall -Wextra -Werror -g -O1 -DVERSION="\"$version\"" $compile_options "$source" -o "$made/$(basename "${source%.*}")" \
            "$@" -lm -ldl -pthread
    done
}

# NAME, and a command before each: runs what `compile` has made
run() {
    local made=$scratch/$1 files=$scratch/files-$1 source program
    shift
    mkdir -p "$files"
    for source in "${programs[@]}"; do
        program=$(basename "${source%.*}")
        local arguments=()
        case $program in
        train | replay | settings) arguments=("$files") ;;
        throws) [ $# = 0 ] || arguments=(caught) ;;
        unload) arguments=("$scratch/prefix/lib/libinstep.so") ;;
        esac
        "$@" "$made/$program" "${arguments[@]}" || { echo "$program failed under '$*' of $made" >&2; return 1; }
    done
}

if [ "${2:-}" = --tsan ]; then
    # Rust's sanitizer runtime, since a C compiler's may be older than the code that Rust makes.
    runtime=$(ls "$(rustc --print target-libdir)"/librustc-*_rt.tsan.a)
    # shellcheck disable=SC2086
    CC=clang CXX=clang++ compile tsan -fsanitize=thread -fno-sanitize-link-runtime -rdynamic \
        -Wl,--whole-archive "$runtime" -Wl,--no-whole-archive $link_options
    run tsan env TSAN_OPTIONS=halt_on_error=1
    exit
fi

# shellcheck disable=SC2086
compile plain $link_options
run plain
for precision in f32 bf16; do
    "$folder/instep" replay --config "$scratch/files-plain/$precision-config.json" \
        --input "$scratch/files-plain/$precision-input.safetensors" --output "$scratch/$precision.safetensors"
    "$folder/instep" diff "$scratch/$precision.safetensors" "$scratch/files-plain/$precision-stepped.safetensors"
done

# shellcheck disable=SC2086
compile asan -fsanitize=address,undefined -fno-sanitize-recover=undefined $link_options
run asan env ASAN_OPTIONS=detect_leaks=1

if command -v valgrind >/dev/null; then
    run plain valgrind -q --error-exitcode=9 --child-silent-after-fork=yes --leak-check=full --show-leak-kinds=definite \
        --errors-for-leak-kinds=definite
else
    echo "SKIPPED: no valgrind"
fi

programs=(examples/step_bucket.c examples/ranks.cpp)
compile static "$scratch/prefix/lib/libinstep.a" -lgcc_s -lutil -lrt
run static
