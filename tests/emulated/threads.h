// The threads of a block as fibers of one OS thread: switching, their order, the block's barriers, and reports.
#pragma once

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
  char from[16];
  int bytes;
  int group;
};

struct Box {  // on its way into shared memory
  char* to;
  std::vector<char> bytes;
  int* barrier;
  Site site;
};

struct Accumulators {  // what d is while it must not be touched
  float* d;
  std::vector<float> values;
};

enum State { READY, IN_WARP, IN_BLOCK, IN_PHASE, IN_WAIT, ENDED };

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
  int *phase_of, parity;  // what it waits for
  std::vector<Wgmma> products;
  std::vector<Accumulators> held;
  int product_groups;
  bool begun;
};

Thread threads[MOST];
int in_warp[MOST / 32];  // lanes of each warp that wait for others of it
std::vector<Box> boxes;
char* stacks;
int count, current;
void (*kernel)(void**);
void** arguments;
char *shared_begin, *shared_end;
unsigned dynamic_bytes;
sigjmp_buf failed;
char message[4096];
unsigned long long random_state;

// ---- what earlier launches wrote ------------------------------------------------------------------------------------

struct Range {
  char* at;
  std::string bytes;  // while they are hidden
};

std::vector<Range> written;
bool hidden;

// Before it waits for them, a block finds 0xff bytes where earlier launches wrote, and what it writes there is lost.
void hide() {
  for (Range& range : written) {
    range.bytes.assign(range.at, range.bytes.size());
    memset(range.at, 0xff, range.bytes.size());
  }
  hidden = true;
}

void show() {
  if (!hidden) return;
  for (size_t i = written.size(); i-- > 0;) memcpy(written[i].at, written[i].bytes.data(), written[i].bytes.size());
  hidden = false;
}

// ---- fibers ---------------------------------------------------------------------------------------------------------

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
  char* end = stacks + (t + 1) * STACK - t * 320 % 16384;  // not all in one set of a cache
  void** top = reinterpret_cast<void**>(end) - 3;
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

// ---- reports --------------------------------------------------------------------------------------------------------

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
      const Exchange& own = *thread.exchange;
      where = text("at %s %s, mask %08x", own.name, at(own.site).c_str(), own.mask);
    }
    if (thread.state == IN_PHASE) where = text("at wait %s for parity %d", at(thread.site).c_str(), thread.parity);
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

// ---- the order of threads -------------------------------------------------------------------------------------------

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
    threads[t].groups = threads[t].product_groups = 0;
    threads[t].products.clear();
    threads[t].held.clear();
    threads[t].begun = false;
  }
  memset(in_warp, 0, sizeof in_warp);
  boxes.clear();
  int warps[MOST / 32];
  const int n = (count + 31) / 32;
  for (;;) {
    bool progress = false;
    arrange(warps, n);
    for (int w = 0; w < n; w++) progress |= run_warp(32 * warps[w]);
    if (progress) continue;
    for (int t = 0; t < count; t++) {
      if (threads[t].state == IN_WAIT) threads[t].state = READY, progress = true;
    }
    if (progress) {
      show();
      continue;
    }
    int ended = 0, waiting = 0;
    for (int t = 0; t < count; t++) {
      ended += threads[t].state == ENDED;
      waiting += threads[t].state == IN_BLOCK;
    }
    if (ended == count) break;
    if (ended + waiting != count) deadlock();
    open_barrier();
  }
  if (!boxes.empty()) stop("block " + place(block_index) + ": nobody waits for load_tile " + at(boxes[0].site));
  if (memcmp(dynamic_shared + dynamic_bytes, zeros, sizeof zeros)) {
    stop("block " + place(block_index) + text(": wrote beyond the %u bytes of dynamic shared memory", dynamic_bytes));
  }
}

}  // namespace

}  // namespace emulated
