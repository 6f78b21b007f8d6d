// grouped_mm, the gradient of its weights, and the first product of an expert's MLP on the CPU.
//
// A job is a block of rows and columns of one expert's product. It packs the columns of the right operand once, in
// the order in which they are used, and then strips of a few rows of the left one; a strip's sums are kept in fp32
// (fp64 for fp64) and go through the epilogue while they are in the caches. Jobs depend on the shape alone, and each
// writes its own block: results do not depend on the number of threads. 16-bit types are widened when packed, except
// that bfloat16 goes to the matrix unit (AMX) as it is where there is one; it also sums in fp32.
// The semantics are those of the references in fastmp/ops/grouped_mm.py.
#include "activations.h"
#include "amx.h"
#include "op.h"
#include "rows.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fastmp {

// Element (outer, term) lies at outer * `outer` + term * `term`; one of the two is 1. Outer are rows of the left
// operand, columns of the right one.
struct Operand {
  const void* data;
  int64_t outer, term;
};

enum class Epilogue { kStore, kAdd, kActivate, kGate };

// `cols` columns of the product, beginning where `b` does; kGate has as many again that begin at `up`. `out` is
// where the block's first element goes, `kept` (or null) the same of the pre-activation, `bias` of the first column;
// up's are `up_offset` elements further in `kept` and `bias`.
struct ProductJob {
  Operand a, b;
  const void* up;
  const void* bias;
  void* out;
  void* kept;
  int64_t rows, cols, terms, out_pitch, kept_pitch, up_offset;
  ScalarType dtype, out_dtype;
  Epilogue epilogue;
  Form form;  // of the activation, for kActivate and kGate
};

// Memory that a thread packs into; it grows, and lives as long as one call of an op.
struct Scratch {
  void* get(int64_t bytes) {
    if (bytes > size) {
      size = (bytes + 4095) / 4096 * 4096;
      memory.reset(std::aligned_alloc(4096, size));
      if (!memory) throw std::bad_alloc();
    }
    return memory.get();
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory;
  int64_t size = 0;
};

FASTMP_DECLARE(void product_job(const ProductJob&, Scratch&);)

namespace FASTMP_ISA {

// A unit multiplies a strip of kRows rows and a panel of kCols columns, both packed, over up to kTermBlock terms; their
// sums are added to those of the terms before. kStrips strips are packed at a time, and kTermUnit terms together, zeros
// where rows, columns or terms are none. VectorUnit does that in lanes, MatrixUnit (amx.h) in tiles of bfloat16.
// Operands come unpacked as a pointer and (outer, term), see Operand.
template <class T>
struct VectorUnit {
  using Stored = T;
  using Packed = scalar_of<T>;
  using V = lanes_of<T>;
  static constexpr int64_t kLanes = num_lanes<V>;
  // sums of a strip and a panel fill the registers
  static constexpr int64_t kRows = kVectorBytes == 64 ? 12 : kVectorBytes == 32 ? 6 : 4, kCols = 2 * kLanes;
  static constexpr int64_t kStrips = 4;  // where rows are neighbours, that uses whole cache lines
  static constexpr int64_t kTermUnit = 1;
  static constexpr int64_t kTermBlock = 128;  // more accurate than one long sum

  // `count` columns from `b` on as panels [panel][term][column].
  static void pack_columns(const T* b, int64_t outer, int64_t term, int64_t count, int64_t terms, Packed* out) {
    for (int64_t first = 0; first < count; first += kCols, out += kCols * terms) {
      const int64_t here = std::min(kCols, count - first);
      const T* from = b + first * outer;
      if (outer == 1) {
        for (int64_t t = 0; t < terms; ++t) {
          for (int64_t j = 0; j < kCols; j += kLanes) {
            V v{};
            if (here > j) v = load(from + t * term + j, here - j, 0);
            store(out + t * kCols + j, v);
          }
        }
        continue;
      }
      if (here < kCols) std::fill(out, out + kCols * terms, Packed(0));
      for (int64_t begin = 0; begin < terms; begin += kLanes) {
        const int64_t some = std::min(kLanes, terms - begin);
        for (int64_t j = 0; j < here; ++j) {
          const V v = load(from + j * outer + begin, some, 0);
          for (int64_t t = 0; t < some; ++t) out[(begin + t) * kCols + j] = v[t];
        }
      }
    }
  }

  // kStrips strips of rows from `a` on, each [row][term], or [term][row] where rows are neighbours in memory.
  static void pack_strips(const T* a, int64_t outer, int64_t term, int64_t rows, int64_t terms, Packed* out) {
    constexpr int64_t kAll = kStrips * kRows;
    if (term == 1) {
      for (int64_t i = 0; i < rows; ++i) {
        for_vectors<kLanes>(terms, [&](int64_t t, auto count) FASTMP_LAMBDA {
          store(out + i * terms + t, load(a + i * outer + t, count, 0), count);
        });
      }
      std::fill(out + rows * terms, out + kAll * terms, Packed(0));
      return;
    }
    Packed line[kAll + kLanes];
    for (int64_t t = 0; t < terms; ++t) {
      std::fill(line + rows, line + kAll, Packed(0));
      for_vectors<kLanes>(rows, [&](int64_t i, auto count) FASTMP_LAMBDA {
        store(line + i, load(a + t * term + i, count, 0), count);
      });
      for (int64_t strip = 0; strip < kStrips; ++strip) {
        std::memcpy(out + (strip * terms + t) * kRows, line + strip * kRows, kRows * sizeof(Packed));
      }
    }
  }

  // sums (kRows, kCols), `pitch` apart, over `terms` terms from `begin` on. Rows of the strip are `strip_pitch` apart,
  // or neighbours if that is 0.
  static void multiply(const Packed* strip, int64_t strip_pitch, const Packed* panel, int64_t begin, int64_t terms,
                       Packed* sums, int64_t pitch) {
    constexpr std::make_integer_sequence<int, kRows> rows{};
    const Packed* b = panel + begin * kCols;
    if (strip_pitch > 0) {
      multiply_rows<true>(strip + begin, strip_pitch, b, terms, sums, pitch, begin == 0, rows);
    } else {
      multiply_rows<false>(strip + begin * kRows, 0, b, terms, sums, pitch, begin == 0, rows);
    }
  }

 private:
  // Rows are unrolled by their numbers, a pack: as a loop, GCC keeps the sums in memory.
  template <bool kRowsApart, int... kRow>
  static void multiply_rows(const Packed* a, int64_t a_pitch, const Packed* b, int64_t terms, Packed* sums,
                            int64_t pitch, bool first, std::integer_sequence<int, kRow...>) {
    V left[sizeof...(kRow)] = {}, right[sizeof...(kRow)] = {};
    for (int64_t t = 0; t < terms; ++t) {
      const V b_left = load(b + t * kCols), b_right = load(b + t * kCols + kLanes);
      const auto row = [&](V& l, V& r, Packed x) FASTMP_LAMBDA {
        l += x * b_left;
        r += x * b_right;
      };
      (row(left[kRow], right[kRow], kRowsApart ? a[kRow * a_pitch + t] : a[t * kRows + kRow]), ...);
    }
    const auto add = [&](Packed* sum, V l, V r) FASTMP_LAMBDA {
      store(sum, first ? l : load(sum) + l);
      store(sum + kLanes, first ? r : load(sum + kLanes) + r);
    };
    (add(sums + kRow * pitch, left[kRow], right[kRow]), ...);
  }
};

// One row of the epilogue: `sums`, and for kGate `up`, hold job.cols columns.
template <class T, class Out, Epilogue epilogue, Form form>
FASTMP_INLINE void finish_row(const ProductJob& job, int64_t row, const scalar_of<T>* sums, const scalar_of<T>* up) {
  using V = lanes_of<T>;
  Out* out = static_cast<Out*>(job.out) + row * job.out_pitch;
  T* kept = job.kept ? static_cast<T*>(job.kept) + row * job.kept_pitch : nullptr;
  const T* bias = static_cast<const T*>(job.bias);
  for_vectors<num_lanes<V>>(job.cols, [&](int64_t col, auto count) FASTMP_LAMBDA {
    V v = load(sums + col, count, 0);
    if constexpr (epilogue == Epilogue::kAdd) v += load(out + col, count, 0);
    if constexpr (epilogue == Epilogue::kActivate || epilogue == Epilogue::kGate) {
      if (bias) v += load(bias + col, count, 0);
      if (kept) store(kept + col, v, count);
      v = activation<form>(v);
      if constexpr (epilogue == Epilogue::kGate) {
        V u = load(up + col, count, 0);
        if (bias) u += load(bias + job.up_offset + col, count, 0);
        if (kept) store(kept + job.up_offset + col, u, count);
        v = v * u;
      }
    }
    store(out + col, v, count);
  });
}

// The epilogue of `rows` rows from `first` on, whose sums are `pitch` apart; those of up lie `up_offset` further.
template <class T>
void finish(const ProductJob& job, int64_t first, int64_t rows, const scalar_of<T>* sums, int64_t pitch,
            int64_t up_offset) {
  const auto all = [&](auto out, auto epilogue, auto form) {
    using Out = typename decltype(out)::type;
    for (int64_t i = 0; i < rows; ++i) {
      finish_row<T, Out, epilogue.value, form.value>(job, first + i, sums + i * pitch, sums + i * pitch + up_offset);
    }
  };
  using Wide = TypeTag<scalar_of<T>>;
  using Same = TypeTag<T>;
  constexpr std::integral_constant<Form, Form::kSilu> silu{};
  const auto activated = [&](auto epilogue) {
    switch (job.form) {
      case Form::kSilu: return all(Same{}, epilogue, silu);
      case Form::kGeluTanh: return all(Same{}, epilogue, std::integral_constant<Form, Form::kGeluTanh>{});
      case Form::kGelu: return all(Same{}, epilogue, std::integral_constant<Form, Form::kGelu>{});
    }
  };
  switch (job.epilogue) {
    case Epilogue::kStore: return all(Same{}, std::integral_constant<Epilogue, Epilogue::kStore>{}, silu);
    case Epilogue::kActivate: return activated(std::integral_constant<Epilogue, Epilogue::kActivate>{});
    case Epilogue::kGate: return activated(std::integral_constant<Epilogue, Epilogue::kGate>{});
    case Epilogue::kAdd: {
      constexpr std::integral_constant<Epilogue, Epilogue::kAdd> add{};
      return job.out_dtype == job.dtype ? all(Same{}, add, silu) : all(Wide{}, add, silu);
    }
  }
}

template <class Unit>
void multiply_job(const ProductJob& job, Scratch& scratch) {
  using T = typename Unit::Stored;
  using P = typename Unit::Packed;
  using S = scalar_of<T>;
  constexpr int64_t kRows = Unit::kRows, kCols = Unit::kCols;
  const auto round_up = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; };
  const bool pair = job.epilogue == Epilogue::kGate;
  const int64_t width = round_up(job.cols, kCols), pitch = pair ? 2 * width : width;
  const int64_t terms = round_up(job.terms, Unit::kTermUnit), strip_pitch = job.a.term == 1 ? terms : 0;
  const int64_t packed = (pitch + Unit::kStrips * kRows) * terms;
  P* columns = static_cast<P*>(scratch.get(packed * sizeof(P) + kRows * pitch * sizeof(S)));
  P* strips = columns + pitch * terms;
  S* sums = reinterpret_cast<S*>(columns + packed);
  const Unit unit{};
  const auto pack = [&](const void* b, P* out) {
    unit.pack_columns(static_cast<const T*>(b), job.b.outer, job.b.term, job.cols, job.terms, out);
  };
  pack(job.b.data, columns);
  if (pair) pack(job.up, columns + width * terms);
  for (int64_t row = 0; row < job.rows; row += kRows) {
    const int64_t left = job.rows - row, number = row / kRows % Unit::kStrips;
    if (number == 0) {
      const T* a = static_cast<const T*>(job.a.data) + row * job.a.outer;
      unit.pack_strips(a, job.a.outer, job.a.term, std::min(left, Unit::kStrips * kRows), job.terms, strips);
    }
    if (terms == 0) std::fill(sums, sums + kRows * pitch, S(0));
    for (int64_t begin = 0; begin < terms; begin += Unit::kTermBlock) {
      const int64_t some = std::min(Unit::kTermBlock, terms - begin);
      for (int64_t col = 0; col < pitch; col += kCols) {
        unit.multiply(strips + number * kRows * terms, strip_pitch, columns + col * terms, begin, some, sums + col,
                      pitch);
      }
    }
    finish<T>(job, row, std::min(kRows, left), sums, pitch, width);
  }
}

void product_job(const ProductJob& job, Scratch& scratch) {
#ifdef FASTMP_AMX
  if (job.dtype == ScalarType::BFloat16 && has_amx()) return multiply_job<MatrixUnit>(job, scratch);
#endif
  dispatch_float(job.dtype, "grouped_mm",
                 [&](auto tag) { multiply_job<VectorUnit<typename decltype(tag)::type>>(job, scratch); });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

// Calls body(expert, first row, rows) for each expert, and returns where the rows of nobody begin. An end before its
// start, or beyond all rows, is moved there.
template <class Body>
int64_t for_experts(const char* op, const Tensor& offsets, int64_t num_rows, const Body& body) {
  FASTMP_CHECK(offsets.dim() == 1 && offsets.scalar_type() == ScalarType::Int, op, ": offsets must be int32 (E,)");
  const Tensor ends = torch::stable::contiguous(offsets);
  const auto* end = static_cast<const int32_t*>(ends.const_data_ptr());
  int64_t start = 0;
  for (int64_t expert = 0; expert < offsets.size(0); ++expert) {
    const int64_t next = std::max(start, std::min<int64_t>(end[expert], num_rows));
    body(expert, start, next - start);
    start = next;
  }
  return start;
}

// With unit last stride; copied only where it has another.
Tensor along_rows(const Tensor& t) {
  return t.stride(t.dim() - 1) == 1 || t.numel() == 0 ? t : torch::stable::contiguous(t);
}

void check_operands(const char* op, const Tensor& a, const Tensor& b, int64_t a_dim, int64_t b_dim) {
  FASTMP_CHECK(a.dim() == a_dim && b.dim() == b_dim, op, ": operands have ", a.dim(), " and ", b.dim(), " dimensions");
  FASTMP_CHECK(a.scalar_type() == b.scalar_type(), op, ": operands are ", dtype_name(a.scalar_type()), " and ",
               dtype_name(b.scalar_type()));
  dispatch_float(a.scalar_type(), op, [](auto) {});
}

void* place(const Tensor& t, int64_t element) {
  return const_cast<char*>(at(t.const_data_ptr(), element, static_cast<int64_t>(t.element_size())));
}

void zero(const Tensor& t, int64_t element, int64_t count) {
  if (count > 0) std::memset(place(t, element), 0, static_cast<size_t>(count) * t.element_size());
}

// Splits whole products into blocks of at most 1024 rows, and so many columns that those of the right operand stay
// in the second-level cache; runs them over all threads.
void run_products(const std::vector<ProductJob>& products, const Tensor& x, const Tensor& out) {
  const auto itemsize = static_cast<int64_t>(x.element_size()), out_size = static_cast<int64_t>(out.element_size());
  constexpr int64_t kRows = 1024, kUnit = 32, kBytes = 1 << 20;
  std::vector<ProductJob> jobs;
  for (const ProductJob& whole : products) {
    const int64_t fit = kBytes / std::max<int64_t>(1, whole.terms * itemsize) / kUnit * kUnit;
    const int64_t cols = std::clamp<int64_t>(fit, 4 * kUnit, 16 * kUnit);
    for (int64_t col = 0; col < whole.cols; col += cols) {
      for (int64_t row = 0; row < whole.rows; row += kRows) {
        ProductJob job = whole;
        const auto move = [](auto& p, int64_t bytes) {
          if (p) p = const_cast<char*>(static_cast<const char*>(p)) + bytes;
        };
        job.rows = std::min(kRows, whole.rows - row);
        job.cols = std::min(cols, whole.cols - col);
        move(job.a.data, row * whole.a.outer * itemsize);
        move(job.b.data, col * whole.b.outer * itemsize);
        move(job.up, col * whole.b.outer * itemsize);
        move(job.bias, col * itemsize);
        move(job.out, (row * whole.out_pitch + col) * out_size);
        move(job.kept, (row * whole.kept_pitch + col) * itemsize);
        jobs.push_back(job);
      }
    }
  }
  parallel_for(0, static_cast<int64_t>(jobs.size()), 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t index = begin; index < end; ++index) FASTMP_BEST(product_job)(jobs[index], scratch);
  });
}

// Rows of x times the weight of their expert, through the epilogue; kept (or null): the pre-activation.
Tensor product(const char* op, const Tensor& x, const Tensor& w, std::optional<Tensor> bias, const Tensor& offsets,
               bool transposed, Epilogue epilogue, Form form, const Tensor* kept) {
  const bool pair = epilogue == Epilogue::kGate;
  const int64_t columns = w.size(transposed ? 2 : 1), cols = pair ? columns / 2 : columns;
  FASTMP_CHECK(x.size(1) == w.size(transposed ? 1 : 2) && offsets.numel() == w.size(0) && (!pair || columns % 2 == 0),
               op, ": shapes do not fit");
  FASTMP_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->dim() == 2 &&
                         bias->size(0) == w.size(0) && bias->size(1) == columns),
               op, ": bias must be ", dtype_name(x.scalar_type()), " (", w.size(0), ", ", columns, ")");
  Tensor y = fastmp::empty({x.size(0), cols}, x.scalar_type(), x);
  const Tensor left = along_rows(x), right = along_rows(w);
  if (bias) bias = torch::stable::contiguous(*bias);
  std::vector<ProductJob> products;
  const int64_t end = for_experts(op, offsets, x.size(0), [&](int64_t expert, int64_t first, int64_t rows) {
    if (rows == 0) return;
    ProductJob job{};
    job.a = {place(left, first * left.stride(0)), left.stride(0), 1};
    job.b = {place(right, expert * right.stride(0)), right.stride(1), 1};
    if (transposed) std::swap(job.b.outer, job.b.term);
    if (pair) job.up = place(right, expert * right.stride(0) + cols * right.stride(1));
    if (bias) job.bias = place(*bias, expert * columns);
    if (kept) job.kept = place(*kept, first * columns);
    job.rows = rows, job.cols = cols, job.terms = x.size(1);
    job.out = place(y, first * cols), job.out_pitch = cols, job.kept_pitch = columns, job.up_offset = cols;
    job.dtype = job.out_dtype = x.scalar_type(), job.epilogue = epilogue, job.form = form;
    products.push_back(job);
  });
  run_products(products, x, y);
  zero(y, end * cols, (x.size(0) - end) * cols);
  if (kept) zero(*kept, end * columns, (x.size(0) - end) * columns);
  return y;
}

Tensor grouped_mm(const Tensor& x, const Tensor& w, const Tensor& offsets, bool transposed) {
  constexpr const char* kOp = "grouped_mm";
  check_operands(kOp, x, w, 2, 3);
  return product(kOp, x, w, std::nullopt, offsets, transposed, Epilogue::kStore, Form{}, nullptr);
}

std::tuple<Tensor, Tensor> grouped_mlp_in(const Tensor& x, const Tensor& w, std::optional<Tensor> bias,
                                          const Tensor& offsets, std::string form, bool gated, bool keep) {
  constexpr const char* kOp = "grouped_mlp_in";
  check_operands(kOp, x, w, 2, 3);
  const int64_t columns = w.size(1);
  Tensor h = keep ? fastmp::empty({x.size(0), columns}, x.scalar_type(), x) : fastmp::empty({0}, x.scalar_type(), x);
  const Epilogue epilogue = gated ? Epilogue::kGate : Epilogue::kActivate;
  return {product(kOp, x, w, bias, offsets, false, epilogue, form_of(kOp, form), keep ? &h : nullptr), h};
}

void weight_gradient(const char* op, const Tensor& out, const Tensor& grad, const Tensor& x, const Tensor& offsets,
                     Epilogue epilogue) {
  check_operands(op, grad, x, 2, 2);
  FASTMP_CHECK(out.dim() == 3 && grad.size(0) == x.size(0) && out.size(0) == offsets.numel() &&
                   out.size(1) == grad.size(1) && out.size(2) == x.size(1),
               op, ": shapes do not fit");
  if (out.numel() == 0) return;
  const Tensor left = along_rows(grad), right = along_rows(x);
  std::vector<ProductJob> products;
  for_experts(op, offsets, x.size(0), [&](int64_t expert, int64_t first, int64_t rows) {
    const int64_t begin = expert * out.stride(0);
    if (rows == 0) {
      if (epilogue == Epilogue::kStore) zero(out, begin, out.size(1) * out.size(2));
      return;
    }
    ProductJob job{};
    job.a = {place(left, first * left.stride(0)), 1, left.stride(0)};
    job.b = {place(right, first * right.stride(0)), 1, right.stride(0)};
    job.rows = out.size(1), job.cols = out.size(2), job.terms = rows;
    job.out = place(out, begin), job.out_pitch = out.stride(1);
    job.dtype = x.scalar_type(), job.out_dtype = out.scalar_type(), job.epilogue = epilogue;
    products.push_back(job);
  });
  run_products(products, x, out);
}

Tensor grouped_mm_wgrad(const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  Tensor out = fastmp::empty({offsets.size(0), grad.size(1), x.size(1)}, x.scalar_type(), x);
  weight_gradient("grouped_mm_wgrad", out, grad, x, offsets, Epilogue::kStore);
  return out;
}

void grouped_mm_wgrad_(Tensor& out, const Tensor& grad, const Tensor& x, const Tensor& offsets) {
  constexpr const char* kOp = "grouped_mm_wgrad_";
  const ScalarType wide = compute_dtype(x.scalar_type());
  FASTMP_CHECK(out.scalar_type() == wide || out.scalar_type() == x.scalar_type(), kOp, ": x is ",
               dtype_name(x.scalar_type()), " but the sum is ", dtype_name(out.scalar_type()));
  if (out.numel() == 0) return;
  if (out.stride(2) == 1) return weight_gradient(kOp, out, grad, x, offsets, Epilogue::kAdd);
  const Tensor sums = torch::stable::contiguous(out);  // of a parameter that lies transposed
  weight_gradient(kOp, sums, grad, x, offsets, Epilogue::kAdd);
  Tensor target = out;
  torch::stable::copy_(target, sums);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "grouped_mm", fastmp::grouped_mm);
  FASTMP_IMPL(m, "grouped_mm_wgrad", fastmp::grouped_mm_wgrad);
  FASTMP_IMPL(m, "grouped_mm_wgrad_", fastmp::grouped_mm_wgrad_);
  FASTMP_IMPL(m, "grouped_mlp_in", fastmp::grouped_mlp_in);
}

#endif  // FASTMP_ISA_BASE
