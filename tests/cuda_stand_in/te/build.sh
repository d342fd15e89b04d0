#!/usr/bin/env bash
# Builds Transformer Engine for the stand-in:  build.sh PYTHON FOLDER STAND_IN
# Its library and Python package are PyPI's wheels (280 MB, 700 MB unpacked). Its PyTorch binding has no CUDA sources:
# g++ and the headers of torch's nvidia packages build it in three minutes on two idle cores. STAND_IN is the folder of
# the stand-in's libraries. What a first, interrupted call left in FOLDER is used by the next.
set -euo pipefail
python=$1 folder=$2 stand_in=$3
version=2.20.2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$folder"
exec 9>lock
flock 9

paths() { "$python" -c "import sysconfig; print(sysconfig.get_path('$1'))"; }
packages=$(paths purelib)
nvidia=$packages/nvidia
cuda=$(dirname "$(find "$nvidia" -name cuda_runtime_api.h | head -n 1)")

if [ ! -f fetched ]; then
    fetch() { "$python" -m pip download --quiet --no-deps --dest download "$@"; }
    fetch --no-build-isolation --no-binary :all: "transformer_engine_torch==$version"
    fetch "transformer_engine_cu13==$version" "transformer_engine==$version" \
        nvidia-cudnn-frontend 'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-crt==13.0.*'
    unpack() { "$python" -m zipfile -e download/"$1"-*.whl "$2"; }
    unpack nvidia_cudnn_frontend headers
    unpack nvidia_cuda_cccl headers
    unpack nvidia_cuda_crt headers
    unpack transformer_engine site
    unpack transformer_engine_cu13 site
    tar -xzf "download/transformer_engine_torch-$version.tar.gz"
    "$python" -m pip install --quiet --no-deps --target site onnxscript onnx onnx_ir ml_dtypes \
        nvdlfw-inspect
    touch fetched
fi

binding=site/transformer_engine_torch.$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX").lstrip("."))')
if [ ! -f "$binding" ]; then
    cd "transformer_engine_torch-$version"
    # Read by each compiler as a file of options.
    cat >options <<END
-std=c++20 -O0 -g0 -fPIC -w -fvisibility=hidden
-DTORCH_EXTENSION_NAME=transformer_engine_torch -DTORCH_API_INCLUDE_EXTENSION_H
-Icommon_headers -Icommon_headers/common -Icommon_headers/common/include -Icsrc
-I$(paths include) -I$packages/torch/include -I$packages/torch/include/torch/csrc/api/include
-I$cuda -I$nvidia/cudnn/include -I$nvidia/nccl/include -I$folder/headers/include
-I$folder/headers/nvidia/cu13/include -I$folder/headers/nvidia/cu13/include/cccl
END
    mkdir -p objects precompiled
    echo '#include "extensions.h"' >precompiled/all.h
    [ -f precompiled/all.h.gch ] ||
        { g++ @options -x c++-header precompiled/all.h -o precompiled/new &&
            mv precompiled/new precompiled/all.h.gch; }
    compile() {
        object=objects/$(tr / _ <<<"$1").o
        [ -f "$object" ] && return
        g++ -include precompiled/all.h @options -c "$1" -o "$object.new" && mv "$object.new" "$object"
    }
    export -f compile
    find csrc -name '*.cpp' | sort | xargs -P "$(env -u OMP_NUM_THREADS nproc)" -I{} bash -c 'compile {}'
    g++ -shared -o "../$binding.new" objects/*.o -L"$packages/torch/lib" -ltorch -ltorch_cpu \
        -ltorch_cuda -ltorch_python -lc10 -lc10_cuda "-Wl,-rpath,$packages/torch/lib"
    rm -rf precompiled
    cd "$folder"
    # Transformer Engine compares the versions of its three packages.
    about=site/transformer_engine_torch-$version.dist-info
    mkdir -p "$about"
    printf 'Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: %s\n' "$version" \
        >"$about/METADATA"
    mv "$binding.new" "$binding"
fi

# cuDNN's graph interface, and errors for what Transformer Engine asks for and the stand-in has not.
g++ -std=c++17 -O1 -fPIC -Wall -I"$here/../shim" -I"$cuda" -I"$nvidia/cudnn/include" \
    -c "$here/cudnn.cpp" -o cudnn.o
{ nm --defined-only cudnn.o; nm -D --defined-only "$stand_in/libcuda.so.1"; } |
    awk '$2 == "T" {print $3}' | sort -u >written
for library in site/transformer_engine/wheel_lib/libtransformer_engine.so "$binding"; do
    nm -D --undefined-only "$library" | awk '{print $2}' | sed 's/@.*//'
done | grep -E '^(_*cuda|cu[A-Z]|cublas|nccl|cudnn)' | sort -u >asked
comm -13 written asked | awk '
    BEGIN { print "int stand_in_missing(const char* name, int error);" }
    { print "int " $1 "(void) { return stand_in_missing(\"" $1 "\", 801); }" }
' >missing.c
gcc -O1 -fPIC -c missing.c -o missing.o
g++ -shared -o libte_stand_in.so.new cudnn.o missing.o
mv libte_stand_in.so.new libte_stand_in.so

# Loaded by name on import, and no function of it is used. torch's packages do not bring it.
mkdir -p curand
gcc -shared -x c /dev/null -o curand/libcurand.so.new
mv curand/libcurand.so.new curand/libcurand.so
