#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace maitred {
namespace {

#if defined(__x86_64__)
// Tiles are 8 KB of state a thread: Linux gives them to a process that asks (Documentation/arch/x86/xstate.rst).
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                              __builtin_cpu_supports("amx-bf16") &&
                              syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
#endif

}  // namespace

std::vector<Isa> available_isas() {
  std::vector<Isa> isas{Isa::plain};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    isas.push_back(Isa::avx2);
  if (isas.back() == Isa::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    isas.push_back(Isa::avx512);
  if (isas.back() == Isa::avx512 && may_use_tiles()) isas.push_back(Isa::amx);
#elif defined(__aarch64__)
  isas.push_back(Isa::neon);
#endif
  return isas;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::plain:
      return "plain";
    case Isa::neon:
      return "neon";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::amx:
      return "amx";
  }
  return "unknown";
}

Isa isa_named(const std::string& name) {
  std::string choices;
  for (Isa isa : available_isas()) {
    if (name == isa_name(isa)) return isa;
    choices += choices.empty() ? isa_name(isa) : std::string(", ") + isa_name(isa);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available here; choose one of auto, " + choices);
}

Isa default_isa() {
  const char* asked = std::getenv("MAITRED_ISA");
  if (asked == nullptr || *asked == '\0' || std::string(asked) == "auto") return available_isas().back();
  return isa_named(asked);
}

}  // namespace maitred
