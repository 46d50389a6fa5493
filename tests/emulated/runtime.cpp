// What the kernels of emulated.h call, and the launch. threads.h has the fibers.
//
// A fiber runs until it has to wait. Warps are taken in turn, each as far as it gets. Where none gets further, those that
// wait for earlier launches go on; where there are none and all living threads of the block wait at a block barrier, that
// opens; anything else is a deadlock, which is reported.
#include "cuda_fp8.h"
#include "threads.h"

namespace emulated {

namespace {

// ---- operations of a warp -------------------------------------------------------------------------------------------

void meet(Exchange& own) {
  const int lane = current % 32, first = current - lane;
  if (!(own.mask >> lane & 1)) {
    stop_thread(std::string(own.name) + " " + at(own.site) + ": the lane is not in its own mask");
  }
  threads[current].exchange = &own;
  threads[current].state = IN_WARP;
  int& waiting = in_warp[current / 32];
  if (++waiting < __builtin_popcount(own.mask)) return leave();
  Exchange* lanes[32];
  for (int i = 0; i < 32; i++) {
    if (!(own.mask >> i & 1)) continue;
    lanes[i] = first + i < count && threads[first + i].state == IN_WARP ? threads[first + i].exchange : nullptr;
    const bool same = lanes[i] && lanes[i]->mask == own.mask && lanes[i]->name == own.name &&
                      (own.anywhere || lanes[i]->site.line == own.site.line);
    if (!same) return leave();
  }
  own.resolve(lanes, own.mask);
  waiting -= __builtin_popcount(own.mask);
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

bool in_shared(const void* p, size_t bytes) {
  const char* c = static_cast<const char*>(p);
  return (c >= shared_begin && c + bytes <= shared_end) ||
         (c >= dynamic_shared && c + bytes <= dynamic_shared + dynamic_bytes);
}

void check_shared(const char* name, const void* p, Site site, size_t bytes = 16, unsigned multiple = 16) {
  if (!in_shared(p, bytes)) stop_thread(std::string(name) + " " + at(site) + ": the address is not in shared memory");
  if (reinterpret_cast<uintptr_t>(p) % multiple) {
    stop_thread(std::string(name) + " " + at(site) + text(": the address in shared memory is no multiple of %u", multiple));
  }
}

// ---- barriers in shared memory, boxes, products of a warpgroup --------------------------------------------------------

enum { ARRIVALS, MISSING, BYTES, PHASE };  // of a Barrier

void check_barrier(const int* barrier, Site site) {
  check_shared("a barrier", barrier, site, 16, 8);
  if (barrier[ARRIVALS] < 1) stop_thread("a barrier that nobody made is used at " + at(site));
}

void end_phase(int* barrier) {
  if (barrier[MISSING] || barrier[BYTES]) return;
  barrier[MISSING] = barrier[ARRIVALS];
  barrier[PHASE]++;
  for (int t = 0; t < count; t++) {
    Thread& thread = threads[t];
    if (thread.state == IN_PHASE && thread.phase_of == barrier && barrier[PHASE] % 2 != thread.parity) {
      thread.state = READY;
    }
  }
}

void deliver(int* barrier) {
  size_t kept = 0;
  std::vector<Box> here;
  for (Box& box : boxes) {
    if (box.barrier == barrier) {
      here.push_back(box);
    } else {
      boxes[kept++] = box;
    }
  }
  boxes.resize(kept);
  for (const Box& box : here) {
    memcpy(box.to, box.bytes.data(), box.bytes.size());
    barrier[BYTES] -= int(box.bytes.size());
    end_phase(barrier);
  }
}

// Row `row` of a tile, its 32 bytes number `step`: 16 numbers of bf16, or 32 of FP8.
void read_tile(float (&to)[32], const char* tile, int apart, int row, int step, bool e4m3) {
  const char* begin = tile + row / 8 * apart + 128 * (row % 8);
  for (int i = 0; i < 16; i++) {
    unsigned short pair;
    memcpy(&pair, begin + 16 * ((2 * step + i / 8) ^ row % 8) + 2 * (i % 8), 2);
    if (e4m3) {
      to[2 * i] = of_fp8(pair), to[2 * i + 1] = of_fp8(pair >> 8);
    } else {
      to[i] = low(pair);
    }
  }
}

// The same of rows whose words lie in one another.
void read_words(float (&to)[32], const char* first, int apart, int word, int row, int step, bool e4m3) {
  for (int i = 0; i < 16; i++) {
    unsigned short pair;
    memcpy(&pair, first + row / 8 * apart + (2 * step + i / 8) * word + 16 * (row % 8) + 2 * (i % 8), 2);
    if (e4m3) {
      to[2 * i] = of_fp8(pair), to[2 * i + 1] = of_fp8(pair >> 8);
    } else {
      to[i] = low(pair);
    }
  }
}

void multiply(const Wgmma& p, float* d) {
  const int lane = current % 32, first = current / 32 % 4 * 16 + lane / 4, n = p.e4m3 ? 32 : 16;
  float a[2][32], b[32];
  for (int i = 0; i < 2; i++) read_tile(a[i], p.a, p.a_apart, first + 8 * i, p.step, p.e4m3);
  for (int j = 0; j < p.numbers / 2; j++) {
    const int row = j / 2 * 8 + 2 * (lane % 4) + j % 2;
    p.b_words ? read_words(b, p.b, p.b_apart, p.b_words, row, p.step, p.e4m3)
              : read_tile(b, p.b, p.b_apart, row, p.step, p.e4m3);
    for (int i = 0; i < 2; i++) {
      float& sum = d[j / 2 * 4 + 2 * i + j % 2];
      for (int k = 0; k < n; k++) sum += a[i][k] * b[k];
    }
  }
}

void queue_product(Wgmma p, bool add, Site site) {
  Thread& own = threads[current];
  const int last_rows = (p.numbers / 4 - 1) * p.b_apart;
  if (p.b_words) {
    check_shared("wgmma", p.b, site, last_rows + (2 * p.step + 1) * p.b_words + 128);
  } else {
    check_shared("wgmma", p.b, site, last_rows + 1024, 1024);
  }
  if (!own.begun) stop_thread("wgmma " + at(site) + ": no wgmma_begin() before it");
  bool known = false;
  for (const Accumulators& a : own.held) known |= a.d == p.d;
  if (!add && known) stop_thread("wgmma " + at(site) + ": d is put to zero while products are added to it");
  if (!add) memset(p.d, 0, p.numbers * sizeof(float));
  if (!known) own.held.push_back({p.d, std::vector<float>(p.d, p.d + p.numbers)});
  memset(p.d, 0xff, p.numbers * sizeof(float));
  p.group = own.product_groups;
  own.products.push_back(p);
}

}  // namespace

// ---- what kernels call ----------------------------------------------------------------------------------------------

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
  own.name = transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4";
  own.mask = ~0u, own.site = site, own.r = r, own.row = row;
  own.resolve = transposed ? resolve_matrices<true> : resolve_matrices<false>;
  meet(own);
}

void copy_async(void* shared, const void* src, bool valid, int bytes, Site site) {
  const std::string name = "cp_async" + std::to_string(bytes);
  check_shared(name.c_str(), shared, site, bytes, bytes);
  if (valid && reinterpret_cast<uintptr_t>(src) % bytes) {
    stop_thread(name + " " + at(site) + ": the source is no multiple of " + std::to_string(bytes));
  }
  Copy copy{static_cast<char*>(shared), {}, bytes, threads[current].groups};
  if (valid) memcpy(copy.from, src, bytes);
  memset(shared, 0xff, bytes);
  threads[current].copies.push_back(copy);
}

void copy_commit() { threads[current].groups++; }

void copy_wait(int still) {
  Thread& own = threads[current];
  size_t kept = 0;
  for (const Copy& copy : own.copies) {
    if (copy.group < own.groups - still) {
      memcpy(copy.to, copy.from, copy.bytes);
    } else {
      own.copies[kept++] = copy;
    }
  }
  own.copies.resize(kept);
}

void make_barrier(int* barrier, int arrivals, Site site) {
  check_shared("make_barrier", barrier, site, 16, 8);
  barrier[ARRIVALS] = barrier[MISSING] = arrivals;
  barrier[BYTES] = barrier[PHASE] = 0;
}

void arrive(int* barrier, int bytes, Site site) {
  check_barrier(barrier, site);
  barrier[BYTES] += bytes;
  if (barrier[MISSING]-- < 1) stop_thread("more arrivals than the barrier has at " + at(site));
  end_phase(barrier);
}

void wait(int* barrier, int parity, Site site) {
  check_barrier(barrier, site);
  deliver(barrier);
  if (barrier[PHASE] % 2 != parity) return;
  Thread& own = threads[current];
  own.phase_of = barrier, own.parity = parity, own.site = site, own.state = IN_PHASE;
  leave();
}

void under_way(const Box& box) {
  memset(box.to, 0xff, box.bytes.size());
  boxes.push_back(box);
  for (int t = 0; t < count; t++) {
    if (threads[t].state == IN_PHASE && threads[t].phase_of == box.barrier) return deliver(box.barrier);
  }
}

void load_box(void* to, const char* base, long long row_bytes, const long long (&rows)[3], const long long (&pitch)[3],
              const long long (&box)[3], const long long (&begin)[3], long long column, int* barrier, Site site) {
  const long long all = box[0] * box[1] * box[2];
  check_shared("load_tile", to, site, 128 * all, 128);
  check_barrier(barrier, site);
  Box made{static_cast<char*>(to), std::vector<char>(128 * all), barrier, site};
  const int first = reinterpret_cast<uintptr_t>(to) / 128 % 8;  // words are swizzled by where they lie in 1024 bytes
  for (int r = 0; r < all; r++) {
    const long long at[3] = {begin[0] + r / (box[1] * box[2]), begin[1] + r / box[2] % box[1], begin[2] + r % box[2]};
    bool row = true;
    for (int axis = 0; axis < 3; axis++) row &= at[axis] >= 0 && at[axis] < rows[axis];
    for (int i = 0; i < 128; i++) {
      const bool inside = row && column + i >= 0 && column + i < row_bytes;
      const char* from = base + at[0] * pitch[0] + at[1] * pitch[1] + at[2] * pitch[2] + column + i;
      made.bytes[128 * r + (i / 16 ^ (first + r) % 8) * 16 + i % 16] = inside ? *from : 0;
    }
  }
  under_way(made);
}

void load_run(void* to, const void* from, int bytes, int* barrier, Site site) {
  check_shared("load_run", to, site, bytes);
  check_barrier(barrier, site);
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
    stop_thread("load_run " + at(site) + ": the source or the number of bytes is no multiple of 16");
  }
  const char* first = static_cast<const char*>(from);
  under_way({static_cast<char*>(to), std::vector<char>(first, first + bytes), barrier, site});
}

void wgmma_begin(Site site) {
  warp_barrier(~0u, site);
  threads[current].begun = true;
}

void wgmma_end(Site site) {
  warp_barrier(~0u, site);
  threads[current].begun = false;
  threads[current].product_groups++;
}

void wgmma_wait(int still, Site site) {
  warp_barrier(~0u, site);
  Thread& own = threads[current];
  std::vector<Wgmma> kept;
  for (const Wgmma& p : own.products) {
    if (p.group >= own.product_groups - still) {
      kept.push_back(p);
      continue;
    }
    for (Accumulators& a : own.held) {
      if (a.d == p.d) multiply(p, a.values.data());
    }
  }
  own.products = kept;
  std::vector<Accumulators> held;
  for (const Accumulators& a : own.held) {
    bool more = false;
    for (const Wgmma& p : kept) more |= p.d == a.d;
    if (more) {
      held.push_back(a);
    } else {
      memcpy(a.d, a.values.data(), a.values.size() * sizeof(float));
    }
  }
  own.held = held;
  warp_barrier(~0u, site);  // no lane may tell others that it is done with the tiles before all are
}

void wgmma(const Wgmma& p, int add, Site site) {
  check_shared("wgmma", p.a, site, 7 * p.a_apart + 1024, 1024);
  queue_product(p, add, site);
}

void previous_done() {
  if (!hidden) return;
  threads[current].state = IN_WAIT;
  leave();
}

void fail(const char* what, Site site) { stop_thread(std::string(what) + " at " + at(site)); }

}  // namespace emulated

// ---- the sanitizer's reports ----------------------------------------------------------------------------------------

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
  using namespace emulated;
  const std::string what = address ? text("no multiple of %u", 1u << data->log_alignment) : "null";
  stop_thread(text("%s:%u: an access to address %#lx, which is %s", base_name(data->location.file), data->location.line,
                   address, what.c_str()));
}
extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(Location* data, unsigned long index) {
  using namespace emulated;
  stop_thread(text("%s:%u: index %d is outside the array", base_name(data->file), data->line, int(index)));
}

// ---- a launch -------------------------------------------------------------------------------------------------------

// The ranges that the next launch hides.
extern "C" void emulated_written(int n, char** at, const unsigned long* sizes) {
  emulated::written.clear();
  for (int i = 0; i < n; i++) emulated::written.push_back({at[i], std::string(sizes[i], 0)});
}

// Returns what went wrong, or null. order: 0 forward, 1 reverse, 2 random.
extern "C" const char* emulated_launch(void (*function)(void**), void** args, const unsigned* grid,
                                       const unsigned* block, unsigned shared, char* begin, char* end, int given_order,
                                       unsigned seed) {
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
          hide();
          run_block();
          show();
        }
      }
    }
  } else {
    result = message;
    show();
  }
  for (int i = 0; i < 3; i++) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return result;
}
