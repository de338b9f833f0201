// What recurrent_run.h says, compiled for plain.
#include "recurrent_run.h"
#include "vec_plain.h"

namespace maitred {

const RecurrentKernels& recurrent_kernels_plain() { return kRecurrent<Vec1>; }

}  // namespace maitred
