// What qkv_run.h says, compiled for any processor.
#include "qkv_run.h"

namespace maitred {

const QKVKernels& qkv_kernels_plain() { return kKernels<PlainFormats>; }

}  // namespace maitred
