// Lets a program that was compiled for AMX run on a CPU without it: each of its tile instructions raises SIGILL here, is decoded from
// its bytes (Intel's manual, volume 2, "Instruction format" and the opcodes of AMX), and is computed by amx_model.h.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <signal.h>
#include <ucontext.h>

#include "tests/kernels/amx_model.h"

namespace {

greg_t& reg(ucontext_t* context, unsigned number) {  // as instructions number them
  static const int PLACES[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[PLACES[number]];
}

struct Operand {
  int64_t address, stride;  // stride: of a tile's rows, the index register's
  int size;                 // bytes of ModRM and what follows it
};

// The operand in memory. code: at ModRM; x, b: VEX.X and VEX.B as numbers to add.
Operand decode(ucontext_t* context, const uint8_t* code, unsigned x, unsigned b, bool sib_alone) {
  const unsigned mod = code[0] >> 6, rm = code[0] & 7;
  Operand operand{0, 0, 1};
  int32_t displacement = 0;
  unsigned base = rm | b;
  bool has_base = true, relative = false;
  if (rm == 4) {
    const unsigned sib = code[operand.size++], index = (sib >> 3 & 7) | x;
    base = (sib & 7) | b;
    has_base = !(mod == 0 && (sib & 7) == 5);
    if (index != 4) operand.stride = reg(context, index) << (sib >> 6);
    if (!sib_alone) operand.address += operand.stride;
  } else {
    if (sib_alone) amx_model::fault("#UD: rows of a tile without a SIB byte");
    relative = mod == 0 && rm == 5;
    has_base = !relative;
  }
  if (mod == 1) {
    displacement = static_cast<int8_t>(code[operand.size++]);
  } else if (mod == 2 || !has_base) {
    memcpy(&displacement, code + operand.size, sizeof(displacement));
    operand.size += 4;
  }
  if (has_base) operand.address += reg(context, base);
  operand.address += displacement;
  if (relative) operand.address += reinterpret_cast<int64_t>(code + operand.size);  // of the next instruction
  return operand;
}

[[noreturn]] void unknown() { amx_model::fault("SIGILL at an instruction that is none of AMX's that kernels use"); }

void trap(int, siginfo_t*, void* opaque) {
  ucontext_t* context = static_cast<ucontext_t*>(opaque);
  const uint8_t* code = reinterpret_cast<const uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
  // VEX of three bytes, map 0F38, W0, 128 bits.
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) unknown();
  const unsigned x = code[1] & 0x40 ? 0 : 8, b = code[1] & 0x20 ? 0 : 8, vvvv = ~code[2] >> 3 & 15, prefix = code[2] & 3;
  const uint8_t opcode = code[3], *modrm = code + 4;
  const unsigned r = modrm[0] >> 3 & 7, rm = modrm[0] & 7;
  const bool in_register = modrm[0] >> 6 == 3;
  enum { kNone, k66, kF3, kF2 };
  int size = 1;
  if (opcode == 0x49 && prefix == kNone && modrm[0] == 0xc0 && vvvv == 0) {
    amx_model::release();
  } else if (opcode == 0x49 && prefix == kNone && !in_register && r == 0 && vvvv == 0) {
    const Operand operand = decode(context, modrm, x, b, false);
    amx_model::loadconfig(reinterpret_cast<const void*>(operand.address));
    size = operand.size;
  } else if (opcode == 0x49 && prefix == kF2 && in_register && rm == 0 && vvvv == 0) {
    amx_model::zero(r);
  } else if (opcode == 0x4b && (prefix == kF2 || prefix == kF3) && !in_register && vvvv == 0) {
    const Operand operand = decode(context, modrm, x, b, true);
    if (prefix == kF2) {
      amx_model::loadd(r, reinterpret_cast<const void*>(operand.address), operand.stride);
    } else {
      amx_model::stored(r, reinterpret_cast<void*>(operand.address), operand.stride);
    }
    size = operand.size;
  } else if (opcode == 0x5c && prefix == kF3 && in_register) {
    amx_model::dpbf16ps(r, rm, vvvv);
  } else {
    unknown();
  }
  context->uc_mcontext.gregs[REG_RIP] += 4 + size;
}

__attribute__((constructor)) void install() {
  struct sigaction action = {};
  action.sa_sigaction = trap;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace
