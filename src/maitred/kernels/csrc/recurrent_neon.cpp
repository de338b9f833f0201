// What recurrent_run.h says, compiled for neon.
#include "recurrent_run.h"
#include "vec_neon.h"

namespace maitred {

const RecurrentKernels& recurrent_kernels_neon() { return kRecurrent<Vec4>; }

}  // namespace maitred
