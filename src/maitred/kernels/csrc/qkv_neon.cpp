// What qkv_run.h says, compiled for NEON.
#include "qkv_run.h"

namespace maitred {

const QKVKernels& qkv_kernels_neon() { return kKernels<PlainFormats>; }

}  // namespace maitred
