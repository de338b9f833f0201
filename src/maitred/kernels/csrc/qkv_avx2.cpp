// What qkv_run.h says, compiled for AVX2.
#include "qkv_run.h"

namespace maitred {

const QKVKernels& qkv_kernels_avx2() { return kKernels<PlainFormats>; }

}  // namespace maitred
