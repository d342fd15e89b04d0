#!/usr/bin/env bash
# Builds the stand-in's two libraries into a folder:  build.sh PYTHON FOLDER
# Needs g++ and binutils; headers are those of the nvidia packages that PYTHON's torch came with.
set -euo pipefail
python=$1 folder=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cuda=$(dirname "$(find "$site/nvidia" -name cuda_runtime_api.h | head -n 1)")
nccl=$(dirname "$(find "$site/nvidia" -name nccl.h | head -n 1)")
blas=$(dirname "$(find "$site/nvidia" -name cublas_v2.h | head -n 1)")

# Two processes may build at the same time: each does so in a separate folder, the first to be
# done gives its folder the name.
mkdir -p "$(dirname "$folder")"
work=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$work"' EXIT

compile() {
    g++ -std=c++17 -O2 -fPIC -Wall -Wno-unused-function \
        -I"$here/shim" -I"$cuda" -I"$nccl" -I"$blas" -c "$here/$1.cpp" -o "$work/$1.o"
}
compile device &
compile nccl &
gcc -O1 -fPIC -shared -Wl,-soname,libnvidia-ml.so.1 -o "$work/libnvidia-ml.so.1" "$here/nvml.c"
wait -n
wait -n

# What torch asks for and is not written: a matrix product leaves its line, all else is an error.
nm --defined-only "$work/device.o" "$work/nccl.o" | awk '$2 == "T" {print $3}' | sort -u \
    >"$work/written"
for library in libtorch_cuda libc10_cuda libtorch_python libcaffe2_nvrtc libtorch_cuda_linalg; do
    nm -D --undefined-only "$site/torch/lib/$library.so" | awk '{print $2}' | sed 's/@.*//'
done | grep -E '^(_*cuda|cu[A-Z]|cublas|nccl)' |
    grep -vE '^cu(File|solver|sparse|fft|rand|dnn)' | sort -u >"$work/asked"
comm -13 "$work/written" "$work/asked" | awk '
    BEGIN {
        print "int stand_in_blas(void* handle, const char* name);"
        print "int stand_in_missing(const char* name, int error);"
    }
    /^cublas/ { print "int " $1 "(void* handle) { return stand_in_blas(handle, \"" $1 "\"); }"; next }
    { error = /^nccl/ ? 3 : 801; print "int " $1 "(void) { return stand_in_missing(\"" $1 "\", " error "); }" }
' >"$work/generated.c"
gcc -O1 -fPIC -c "$work/generated.c" -o "$work/generated.o"
g++ -shared -Wl,-soname,libcuda.so.1 -o "$work/libcuda.so.1" \
    "$work/device.o" "$work/nccl.o" "$work/generated.o" -ldl

echo "written: $(comm -12 "$work/written" "$work/asked" | wc -l) of $(wc -l <"$work/asked")" \
    "functions that torch asks for; generated: $(($(wc -l <"$work/generated.c") - 2))"
mv -T "$work" "$folder" 2>/dev/null || test -e "$folder/libcuda.so.1"
