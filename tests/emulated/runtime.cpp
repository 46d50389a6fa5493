// Runs the threads of a block as fibers of one OS thread, block after block, and lets them wait and exchange.
//
// A fiber runs until it has to wait. Warps are taken in turn, each as far as it gets; where none gets further and all
// living threads of the block wait at a block barrier, that opens; anything else is a deadlock, which is reported.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <map>
#include <string>
#include <vector>

#include "emulated.h"

namespace emulated {

dim3 thread_index, block_index, block_size, grid_size;
alignas(1024) char dynamic_shared[256 * 1024];

namespace {

constexpr int MOST = 1024;
constexpr size_t STACK = 128 * 1024, PAGE = 4096;
const char zeros[PAGE] = {};

struct Exchange {  // what a lane brings to an operation of its warp, and what it takes home
  const char* name;
  unsigned mask;
  Site site;
  void (*resolve)(Exchange** lanes, unsigned mask);
  bool anywhere;  // lanes may come from different lines
  unsigned long long value;
  int from;
  unsigned long long* all;
  float* d;
  const unsigned *a, *b;
  unsigned* r;
  const void* row;
};

struct Copy {
  char* to;
  char bytes[16];
  int group;
};

enum State { READY, IN_WARP, IN_BLOCK, ENDED };

struct Thread {
#ifdef __x86_64__
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  State state;
  dim3 index;
  Exchange* exchange;
  const char* barrier;
  Vote vote;
  bool value;
  unsigned votes;
  Site site;
  std::vector<Copy> copies;
  int groups;
};

Thread threads[MOST];
char* stacks;
int count, current;
void (*kernel)(void**);
void** arguments;
char *shared_begin, *shared_end;
unsigned dynamic_bytes;
sigjmp_buf failed;
char message[4096];
unsigned long long random_state;

// ---- fibers -----------------------------------------------------------------------------------------------------------

void body() {
  kernel(arguments);
  threads[current].state = ENDED;
}

#ifdef __x86_64__

void* scheduler_stack;
extern "C" void emulated_switch(void** save, void* load);
asm(R"(
.text
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void leave() { emulated_switch(&threads[current].stack_pointer, scheduler_stack); }

void first() {
  body();
  leave();
}

void prepare(int t) {
  void** top = reinterpret_cast<void**>(stacks + (t + 1) * STACK - t * 320 % 16384) - 3;  // not all in one set of a cache
  *top = nullptr;  // the return address of first, which never returns; 8 modulo 16, as behind a call
  *--top = reinterpret_cast<void*>(first);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  threads[t].stack_pointer = top;
}

void enter(int t) { emulated_switch(&scheduler_stack, threads[t].stack_pointer); }

#else

ucontext_t scheduler_context;

void leave() { swapcontext(&threads[current].context, &scheduler_context); }

void prepare(int t) {
  getcontext(&threads[t].context);
  threads[t].context.uc_stack.ss_sp = stacks + t * STACK + PAGE;
  threads[t].context.uc_stack.ss_size = STACK - PAGE;
  threads[t].context.uc_link = &scheduler_context;
  makecontext(&threads[t].context, body, 0);
}

void enter(int t) { swapcontext(&scheduler_context, &threads[t].context); }

#endif

void resume(int t) {
  current = t;
  thread_index = threads[t].index;
  enter(t);
}

// ---- reports ----------------------------------------------------------------------------------------------------------

std::string text(const char* format, ...) {
  char line[512];
  va_list list;
  va_start(list, format);
  vsnprintf(line, sizeof line, format, list);
  va_end(list);
  return line;
}

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

std::string place(dim3 p) { return text("(%u, %u, %u)", p.x, p.y, p.z); }

[[noreturn]] void stop(const std::string& what) {
  snprintf(message, sizeof message, "%s", what.c_str());
  siglongjmp(failed, 1);
}

[[noreturn]] void stop_thread(const std::string& what) {
  stop(text("block %s, thread %s: ", place(block_index).c_str(), place(thread_index).c_str()) + what);
}

std::string at(Site site) { return text("%s:%d", base_name(site.file), site.line); }

void deadlock() {
  std::map<std::string, std::pair<int, int>> groups;  // where -> first thread, how many
  for (int t = 0; t < count; t++) {
    const Thread& thread = threads[t];
    std::string where = "ended";
    if (thread.state == IN_BLOCK) where = "at " + std::string(thread.barrier) + " " + at(thread.site);
    if (thread.state == IN_WARP) {
      where = text("at %s %s, mask %08x", thread.exchange->name, at(thread.exchange->site).c_str(), thread.exchange->mask);
    }
    auto& group = groups.insert({where, {t, 0}}).first->second;
    group.second++;
  }
  std::string report = "block " + place(block_index) + ": deadlock.";
  for (const auto& [where, group] : groups) {
    report += text(" %d threads %s (first: thread %d).", group.second, where.c_str(), group.first);
  }
  stop(report);
}

void on_signal(int number, siginfo_t* info, void*) {
  const char* what = number == SIGFPE ? "an integer division by zero" : "an illegal memory access";
  // no allocation here
  snprintf(message, sizeof message, "block (%u, %u, %u), thread (%u, %u, %u): %s (address %p)", block_index.x,
           block_index.y, block_index.z, thread_index.x, thread_index.y, thread_index.z, what, info->si_addr);
  siglongjmp(failed, 1);
}

// ---- the order of threads ---------------------------------------------------------------------------------------------

enum Order { FORWARD, REVERSE, RANDOM };
Order order;

unsigned drawn(unsigned n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned((random_state >> 33) % n);
}

void arrange(int* list, int n) {
  for (int i = 0; i < n; i++) list[i] = order == REVERSE ? n - 1 - i : i;
  if (order == RANDOM) {
    for (int i = n - 1; i > 0; i--) {
      const int j = drawn(i + 1), other = list[i];
      list[i] = list[j];
      list[j] = other;
    }
  }
}

// Runs a warp as far as it gets; in random order sometimes not so far.
bool run_warp(int first) {
  const int n = count - first < 32 ? count - first : 32;
  int lanes[32];
  bool any = false, again = true;
  while (again) {
    again = false;
    arrange(lanes, n);
    for (int i = 0; i < n; i++) {
      if (threads[first + lanes[i]].state == READY) {
        resume(first + lanes[i]);
        any = again = true;
      }
    }
    if (order == RANDOM && drawn(4) == 0) break;
  }
  return any;
}

void open_barrier() {
  unsigned counted = 0, living = 0;
  for (int t = 0; t < count; t++) {
    living += threads[t].state == IN_BLOCK;
    counted += threads[t].state == IN_BLOCK && threads[t].value;
  }
  for (int t = 0; t < count; t++) {
    Thread& thread = threads[t];
    if (thread.state != IN_BLOCK) continue;
    thread.votes = thread.vote == COUNT ? counted : thread.vote == AND ? counted == living : counted > 0;
    thread.state = READY;
  }
}

void run_block() {
  memset(shared_begin, 0xff, shared_end - shared_begin);
  memset(dynamic_shared, 0xff, dynamic_bytes);
  for (int t = 0; t < count; t++) {
    prepare(t);
    threads[t].state = READY;
    threads[t].copies.clear();
    threads[t].groups = 0;
  }
  int warps[MOST / 32];
  const int n = (count + 31) / 32;
  for (;;) {
    bool progress = false;
    arrange(warps, n);
    for (int w = 0; w < n; w++) progress |= run_warp(32 * warps[w]);
    if (progress) continue;
    int ended = 0, waiting = 0;
    for (int t = 0; t < count; t++) {
      ended += threads[t].state == ENDED;
      waiting += threads[t].state == IN_BLOCK;
    }
    if (ended == count) break;
    if (ended + waiting != count) deadlock();
    open_barrier();
  }
  if (memcmp(dynamic_shared + dynamic_bytes, zeros, sizeof zeros)) {
    stop("block " + place(block_index) + text(": wrote beyond the %u bytes of dynamic shared memory", dynamic_bytes));
  }
}

// ---- operations of a warp ---------------------------------------------------------------------------------------------

void meet(Exchange& own) {
  const int lane = current % 32, first = current - lane;
  if (!(own.mask >> lane & 1)) stop_thread(std::string(own.name) + " " + at(own.site) + ": the lane is not in its own mask");
  threads[current].exchange = &own;
  threads[current].state = IN_WARP;
  Exchange* lanes[32];
  for (int i = 0; i < 32; i++) {
    if (!(own.mask >> i & 1)) continue;
    lanes[i] = first + i < count && threads[first + i].state == IN_WARP ? threads[first + i].exchange : nullptr;
    const bool same = lanes[i] && lanes[i]->mask == own.mask && lanes[i]->name == own.name &&
                      (own.anywhere || lanes[i]->site.line == own.site.line);
    if (!same) return leave();
  }
  own.resolve(lanes, own.mask);
  for (int i = 0; i < 32; i++) {
    if (own.mask >> i & 1) threads[first + i].state = READY;
  }
}

#define EACH for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1)

void resolve_nothing(Exchange**, unsigned) {}

void resolve_shuffle(Exchange** lanes, unsigned mask) {
  unsigned long long values[32];
  EACH values[lane] = lanes[lane]->value;
  EACH {
    const int from = lanes[lane]->from;
    lanes[lane]->value = from >= 0 && from < 32 && (mask >> from & 1) ? values[from] : ~0ull;  // else undefined
  }
}

void resolve_gather(Exchange** lanes, unsigned mask) {
  unsigned long long values[32] = {};
  EACH values[lane] = lanes[lane]->value;
  EACH memcpy(lanes[lane]->all, values, sizeof values);
}

float low(unsigned pair) { return __uint_as_float(pair << 16); }
float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

void resolve_product(Exchange** lanes, unsigned) {
  float A[16][16], B[16][8], D[16][8];
  for (int l = 0; l < 32; l++) {
    const int g = l / 4, t = l % 4;
    for (int i = 0; i < 4; i++) {
      const int row = g + 8 * (i % 2), column = 2 * t + 8 * (i / 2);
      A[row][column] = low(lanes[l]->a[i]);
      A[row][column + 1] = high(lanes[l]->a[i]);
    }
    for (int i = 0; i < 2; i++) {
      B[2 * t + 8 * i][g] = low(lanes[l]->b[i]);
      B[2 * t + 8 * i + 1][g] = high(lanes[l]->b[i]);
    }
    for (int i = 0; i < 4; i++) D[g + 8 * (i / 2)][2 * t + i % 2] = lanes[l]->d[i];
  }
  for (int i = 0; i < 16; i++) {
    for (int k = 0; k < 16; k++) {
      for (int j = 0; j < 8; j++) D[i][j] += A[i][k] * B[k][j];
    }
  }
  for (int l = 0; l < 32; l++) {
    for (int i = 0; i < 4; i++) lanes[l]->d[i] = D[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
  }
}

template <bool TRANSPOSED>
void resolve_matrices(Exchange** lanes, unsigned) {
  for (int i = 0; i < 4; i++) {
    unsigned short M[8][8];
    for (int row = 0; row < 8; row++) memcpy(M[row], lanes[8 * i + row]->row, 16);
    for (int l = 0; l < 32; l++) {
      const int g = l / 4, t = l % 4;
      lanes[l]->r[i] = TRANSPOSED ? M[2 * t][g] | unsigned(M[2 * t + 1][g]) << 16
                                  : M[g][2 * t] | unsigned(M[g][2 * t + 1]) << 16;
    }
  }
}

bool in_shared(const void* p) {
  const char* c = static_cast<const char*>(p);
  return (c >= shared_begin && c + 16 <= shared_end) || (c >= dynamic_shared && c + 16 <= dynamic_shared + dynamic_bytes);
}

void check_shared(const char* name, const void* p, Site site) {
  if (!in_shared(p)) stop_thread(std::string(name) + " " + at(site) + ": the address is not in shared memory");
  if (reinterpret_cast<uintptr_t>(p) % 16) {
    stop_thread(std::string(name) + " " + at(site) + ": the address in shared memory is no multiple of 16");
  }
}

}  // namespace

// ---- what kernels call ------------------------------------------------------------------------------------------------

unsigned block_barrier(const char* name, Vote vote, bool value, Site site) {
  Thread& own = threads[current];
  own.barrier = name;
  own.vote = vote;
  own.value = value;
  own.site = site;
  own.state = IN_BLOCK;
  leave();
  return own.votes;
}

void warp_barrier(unsigned mask, Site site) {
  Exchange own{};
  own.name = "__syncwarp", own.mask = mask, own.site = site, own.resolve = resolve_nothing, own.anywhere = true;
  meet(own);
}

unsigned long long shuffle(const char* name, unsigned mask, unsigned long long value, int from, Site site) {
  Exchange own{};
  own.name = name, own.mask = mask, own.site = site, own.resolve = resolve_shuffle, own.value = value, own.from = from;
  meet(own);
  return own.value;
}

void gather(const char* name, unsigned mask, unsigned long long value, unsigned long long (&all)[32], Site site) {
  Exchange own{};
  own.name = name, own.mask = mask, own.site = site, own.resolve = resolve_gather, own.value = value, own.all = all;
  meet(own);
}

void product(float* d, const unsigned* a, const unsigned* b, Site site) {
  Exchange own{};
  own.name = "mma_m16n8k16", own.mask = ~0u, own.site = site, own.resolve = resolve_product, own.d = d, own.a = a;
  own.b = b;
  meet(own);
}

void load_matrices(unsigned* r, const void* row, bool transposed, Site site) {
  check_shared("ldmatrix", row, site);
  Exchange own{};
  own.name = transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", own.mask = ~0u, own.site = site, own.r = r, own.row = row;
  own.resolve = transposed ? resolve_matrices<true> : resolve_matrices<false>;
  meet(own);
}

void copy_async(void* shared, const void* src, bool valid, Site site) {
  check_shared("cp_async16", shared, site);
  if (valid && reinterpret_cast<uintptr_t>(src) % 16) {
    stop_thread("cp_async16 " + at(site) + ": the source is no multiple of 16");
  }
  Copy copy{static_cast<char*>(shared), {}, threads[current].groups};
  if (valid) memcpy(copy.bytes, src, 16);
  memset(shared, 0xff, 16);
  threads[current].copies.push_back(copy);
}

void copy_commit() { threads[current].groups++; }

void copy_wait(int still) {
  Thread& own = threads[current];
  size_t kept = 0;
  for (const Copy& copy : own.copies) {
    if (copy.group < own.groups - still) {
      memcpy(copy.to, copy.bytes, 16);
    } else {
      own.copies[kept++] = copy;
    }
  }
  own.copies.resize(kept);
}

void fail(const char* what, Site site) { stop_thread(std::string(what) + " at " + at(site)); }

}  // namespace emulated

// ---- the sanitizer's reports ------------------------------------------------------------------------------------------

struct Location {
  const char* file;
  unsigned line, column;
};
struct Mismatch {
  Location location;
  const void* type;
  unsigned char log_alignment, kind;
};

extern "C" [[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(Mismatch* data, unsigned long address) {
  emulated::stop_thread(emulated::text("%s:%u: an access to address %#lx, which is %s", emulated::base_name(data->location.file),
                                       data->location.line, address,
                                       address ? emulated::text("no multiple of %u", 1u << data->log_alignment).c_str() : "null"));
}
extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(Location* data, unsigned long index) {
  emulated::stop_thread(emulated::text("%s:%u: index %ld is outside the array", emulated::base_name(data->file), data->line,
                                       long(int(index)) == long(index) ? long(index) : long(int(index))));
}

// ---- a launch ---------------------------------------------------------------------------------------------------------

// Returns what went wrong, or null. order: 0 forward, 1 reverse, 2 random.
extern "C" const char* emulated_launch(void (*function)(void**), void** args, const unsigned* grid, const unsigned* block,
                                       unsigned shared, char* begin, char* end, int given_order, unsigned seed) {
  using namespace emulated;
  if (!stacks) {
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = static_cast<char*>(mmap(nullptr, MOST * STACK, protection, flags, -1, 0));
    if (stacks == MAP_FAILED) return stacks = nullptr, "no memory for the stacks of 1024 threads";
    for (int t = 0; t < MOST; t++) mprotect(stacks + t * STACK, PAGE, PROT_NONE);
  }
  kernel = function, arguments = args, shared_begin = begin, shared_end = end, dynamic_bytes = shared;
  order = Order(given_order), random_state = seed + 1;
  grid_size = {grid[0], grid[1], grid[2]}, block_size = {block[0], block[1], block[2]};
  count = block[0] * block[1] * block[2];
  int t = 0;
  for (unsigned z = 0; z < block[2]; z++) {
    for (unsigned y = 0; y < block[1]; y++) {
      for (unsigned x = 0; x < block[0]; x++) threads[t++].index = {x, y, z};
    }
  }
  memset(dynamic_shared + shared, 0, PAGE);

  static char signal_stack[64 * 1024];
  stack_t alternate = {signal_stack, 0, sizeof signal_stack}, old_stack;
  sigaltstack(&alternate, &old_stack);
  struct sigaction action = {}, old[3];
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 3; i++) sigaction(signals[i], &action, &old[i]);

  const char* result = nullptr;
  if (sigsetjmp(failed, 1) == 0) {
    for (unsigned z = 0; z < grid[2]; z++) {
      for (unsigned y = 0; y < grid[1]; y++) {
        for (unsigned x = 0; x < grid[0]; x++) {
          block_index = {x, y, z};
          run_block();
        }
      }
    }
  } else {
    result = message;
  }
  for (int i = 0; i < 3; i++) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return result;
}
