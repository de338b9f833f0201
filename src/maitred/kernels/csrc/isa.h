// Which instruction set the kernels use: the best this processor has, or what MAITRED_ISA asks for.
//
// Each area has a table of functions for each set, in files named *_plain.cpp, *_avx2.cpp, *_avx512.cpp, *_amx.cpp and
// *_neon.cpp (CMakeLists.txt gives each its flags). Such files keep everything in an anonymous namespace and use no std
// templates: an inline function compiled there must never be the copy that the linker keeps for all. So do the headers
// that are theirs; a set's vectors stand in vec_<set>.h.
#pragma once

#include <string>
#include <vector>

namespace maitred {

enum class Isa { plain, neon, avx2, avx512, amx };

// Sets that this processor and this build have, worst first; plain is always there. avx512 means F, BW, VL, DQ, VNNI
// and BF16; avx2 means AVX2, FMA and F16C; amx means avx512 with AMX's tiles, INT8 and BF16, which the system let this
// process use (it is asked here, once). An area without kernels for amx takes those for avx512.
std::vector<Isa> available_isas();

const char* isa_name(Isa isa);

// Throws std::invalid_argument, naming the choices, for a name that is unknown or not available here.
Isa isa_named(const std::string& name);

// MAITRED_ISA if set (and not empty or "auto"), else the last of available_isas().
Isa default_isa();

}  // namespace maitred
