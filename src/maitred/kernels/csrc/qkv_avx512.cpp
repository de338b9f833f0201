// The run of qkv_token.inc, compiled for avx512.
#include <stddef.h>
#include <stdint.h>

#include "bits.h"
#include "qkv.h"

namespace maitred {
namespace {

#include "qkv_token.inc"

const QKVKernels kKernels{&run};

}  // namespace

const QKVKernels& qkv_kernels_avx512() { return kKernels; }

}  // namespace maitred
