// The run of qkv_token.inc, compiled for avx2.
#include <stddef.h>
#include <stdint.h>

#include "bits.h"
#include "qkv.h"
#include "rotate.h"

namespace maitred {
namespace {

#include "qkv_formats.inc"
#include "qkv_token.inc"

const QKVKernels kKernels{&run, &rotate};

}  // namespace

const QKVKernels& qkv_kernels_avx2() { return kKernels; }

}  // namespace maitred
