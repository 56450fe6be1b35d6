#include "cpu.h"

#include <stdexcept>

#if defined(KVERN_AMX_PATH) && !defined(KVERN_EMULATE_AVX512)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvern {

namespace {

#if defined(KVERN_AMX_PATH)
// Tiles of int8 and bf16, and the system's leave to use their registers, which a process asks for once.
bool may_use_tiles() {
#if defined(KVERN_EMULATE_AVX512)
    return true;
#else
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;  // CPUID 7.0, EDX
    constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
        if ((d & (kBf16 | kTiles | kInt8)) != (kBf16 | kTiles | kInt8)) return false;
        return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
    }();
    return granted;
#endif
}
#endif

const KernelTable* table_of(const std::string& name) {
#if defined(KVERN_X86_PATHS)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (name == "avx2" && avx2) return avx2_kernels();
#if defined(KVERN_AVX512_PATHS)
#if defined(KVERN_EMULATE_AVX512)
    const bool vnni = avx2, bf16 = avx2;
#else
    const bool vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
#endif
#if defined(KVERN_AMX_PATH)
    if (name == "amx" && bf16 && may_use_tiles()) return amx_kernels();
#endif
    if (name == "avx512" && bf16) return avx512_kernels();
    if (name == "avx512vnni" && vnni) return avx512vnni_kernels();
#endif
#endif
    if (name == "portable") return portable_kernels();
    return nullptr;
}

}  // namespace

std::vector<std::string> available_paths() {
    std::vector<std::string> names;
    for (const char* name : {"amx", "avx512", "avx512vnni", "avx2", "portable"}) {
        if (table_of(name)) names.emplace_back(name);
    }
    return names;
}

const KernelTable* select_path(const std::string& name) {
    const std::vector<std::string> names = available_paths();
    if (name.empty()) return table_of(names.front());
    if (const KernelTable* t = table_of(name)) return t;
    std::string known;
    for (const std::string& n : names) known += (known.empty() ? "" : ", ") + n;
    throw std::invalid_argument("kernel path '" + name + "' cannot run on this machine: choose one of " + known);
}

}  // namespace kvern
