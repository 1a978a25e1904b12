// The steps of a program, one row each, and the keys that they are written with.  The code that reads a program, checks
// it and runs it includes this table (program.h, steps.cpp, pass.h, pass.cpp): a new step is a row here and a function
// of Pass.
//
//   STEP(name, Name, cut, "fields", needs)
//
// Pass::name(step, chunk) does the work.  cut defines a chunk: kOnce, all of it; kSerial, a row, one after the other;
// kRows, a row, several at a time if there is much to do; kPieces, kPiece numbers of all rows as one line; kOwn, as
// Pass::open_own decides.
//
// A field is KEY, KEY=TYPE, or KEY>TYPE if the step writes there; KEY? may be left out.
//   floats[W]     a float32 buffer [rows, W] acts[W]       quantized (or copied) activations [rows, W] next[W]
//   activations for a matrix of the same kind; floats for c8, whose scale needs the whole row matrix[N,K]   a packed
//   matrix, or a table of rows low[N,K]      the low plane of a matrix of kind p8, which is read if gate `plane` is on
//   down[N,K]     a packed matrix of kind `downkind` downlow[N,K]  its low plane
//   vector[N]     at least N float32 numbers table         rows by position: every pass checks its length (check.cpp)
//   any           for kind: also the kinds of tables, r8 and r32; for fn: also xielu and clamp
// downkind is `kind` where it is left out, as programs before it have it.
// Sizes are sums of products and quotients of keys and numbers.  n|k is n, or k without n; made: heads whose rows are
// computed, with those of keys and values; tiled: dim rounded up to whole tiles; seen: one more than the last position.
// NEED(good, what): another condition on the step s; NEED_PLANES(low): a low plane, only for p8; NEED_PLANES_OF(kind,
// low): the same of another kind than the step's.
//
// fn: silu, gelu (exact), gelu_tanh (its approximation by tanh), relu, relu2 (its square), sigmoid, swiglu_oai (with a
// gate alone: a clamped silu times up + 1), xielu or clamp. rows: 0 =
// all rows of the pass.  1 = the R rows that reach an LM head; quantize and norm pick them, linear has them already.
// 2, for quantize = times * R rows of a buffer that holds such rows, from row first * R on.

// clang-format off
#ifndef STEP
#define STEP(...)
#endif
#ifndef WEIGHT
#define WEIGHT(...)
#endif
#ifndef BUFFER
#define BUFFER(...)
#endif
#ifndef NUMBER
#define NUMBER(...)
#endif
#ifndef REAL
#define REAL(...)
#endif

// ---- keys: indices of weight inputs and of buffers, -1 for none; numbers: without the key, least, most --------------
WEIGHT(w) WEIGHT(bias) WEIGHT(norm) WEIGHT(beta) WEIGHT(positions) WEIGHT(cos) WEIGHT(sin) WEIGHT(growth)
WEIGHT(qnorm) WEIGHT(knorm) WEIGHT(vnorm) WEIGHT(gate) WEIGHT(up) WEIGHT(gatebias) WEIGHT(upbias) WEIGHT(rate)
WEIGHT(low) WEIGHT(gatelow) WEIGHT(uplow) WEIGHT(relative) WEIGHT(axes) WEIGHT(order) WEIGHT(sinks)
BUFFER(x) BUFFER(base) BUFFER(act) BUFFER(out) BUFFER(qx) BUFFER(kx) BUFFER(vx) BUFFER(z) BUFFER(a) BUFFER(b)
NUMBER(n, 0, 0, kMaxWidth) NUMBER(k, 0, 0, kMaxWidth) NUMBER(at, 0, 0, kMaxWidth)
NUMBER(rows, 0, 0, 2) NUMBER(times, 1, 1, kMaxTimes) NUMBER(first, 0, 0, kMaxTimes)
NUMBER(heads, 0, 0, kMaxCount) NUMBER(kv, 0, 0, kMaxCount) NUMBER(layer, 0, 0, kMaxCount)
NUMBER(dim, 0, 0, kMaxHeadDim) NUMBER(rotary, 0, 0, kMaxHeadDim) NUMBER(window, 0, 0, kMaxSkip)
NUMBER(after, -1, 0, kMaxSkip)
NUMBER(length, 0, 1, kMaxTaps)
NUMBER(add, 0, 0, 1) NUMBER(center, 0, 0, 1) NUMBER(late, 0, 0, 1) NUMBER(shared, 0, 0, 1) NUMBER(memory, 0, 0, 1)
NUMBER(index, 0, 0, kMaxGates) NUMBER(other, -1, 0, kMaxGates) NUMBER(plane, -1, 0, kMaxGates) NUMBER(skip, 0, 0, kMaxSkip)
REAL(eps, 0, 0) REAL(scale, 1, -FLT_MAX) REAL(cap, 0, 0)

// ---- into the residual stream and out of it -------------------------------------------------------------------------

// Rows of a matrix that are the tokens' -> floats, times scale, plus the row's position's row of positions [P, k].
// bias: the rows' scales, for r8.  A token below 0 is left to insert.
STEP(embed, Embed, kSerial, "w=matrix[n,k] low?=low[n,k] plane? kind?=any n k out>floats[k] bias?=vector[n] scale? "
     "positions?=table",
     NEED_PLANES(s.low)
     NEED(s.kind != kR8 || s.bias >= 0, "expected bias: the scales of the rows"))

// Columns at to at + k of the input hidden_in -> floats.
STEP(load, Load, kSerial, "out>floats[k] k at?", )

// In rows of a token below 0, -1 - i: columns at to at + k of row i of the input inserted; add: to the present values.
STEP(insert, Insert, kSerial, "x>floats[k] k at? add?", )

// In place: plus the row's position's row of positions [P, k].
STEP(place, Place, kRows, "x>floats[k] k positions=table", )

// Floats -> columns at to at + k of the output hidden, as wide as the stores that are on.
STEP(store, Store, kSerial, "x=floats[k] k at?", )

// If gate `index` is off, and gate `other` where one is named, the next `skip` steps are left out.
STEP(gate, Gate, kOnce, "index? other? skip?", )

// ---- activations ----------------------------------------------------------------------------------------------------

// (Normed) floats -> what a matrix of that kind multiplies.  order: for each of them, which of x it is.
STEP(quantize, Quantize, kRows, "x=floats[k] norm?=vector[k] beta?=vector[k] center? eps? order?=vector[k] k kind? "
     "out>acts[k] rows? times? first?",
     NEED(s.beta < 0 || s.norm >= 0, "beta without norm")
     NEED(s.rows == 2 || (s.times == 1 && s.first == 0), "times or first out of place"))

// Normed floats -> floats; n: columns at to at + k of a buffer n wide, which may be a copy, without norm.  add: to the
// present values, if need be without norm, and the sum times scale.  center: subtracts the mean first, which makes it a layer norm, if need be
// without weights; beta: added at the end.  In place, if all rows are normed and nothing is added.
STEP(norm, Norm, kRows, "x=floats[k] norm?=vector[k] beta?=vector[k] center? eps? k out>floats[n|k] add? rows? scale? "
     "n? at?",
     NEED(s.beta < 0 || s.norm >= 0, "beta without norm")
     NEED(s.norms() || s.n || s.add, "expected norm")
     NEED(s.rows <= 1, "rows out of place")
     NEED(s.add || s.scale == 1, "scale out of place")
     NEED(s.n ? s.at <= s.n - s.k && !s.add : !s.at, "expected at + k within n, and no add"))

// In place; w: the numbers of xielu, or the least and the most of clamp, and one more.
STEP(activate, Activate, kPieces, "x>floats[k] k fn?=any w?=vector[3] rows?",
     NEED((s.fn >= kFns) == (s.w >= 0), "expected w for xielu and clamp alone")
     NEED(s.fn != kSwigluOai, "fn out of place")
     NEED(s.rows <= 1, "rows out of place"))

// out *= fn(x [rows, k / times]), in place; each number of x applies to `times` numbers.
STEP(multiply, Multiply, kPieces, "x=floats[k/times] k fn? out>floats[k] times?",
     NEED(s.k % s.times == 0, "expected k that times divides"))

// x [R, times * n] (+ base [R, n]) -> out [times * R, n], where row j * R + r is part j of row r.
STEP(split, Split, kRows, "x=floats[n*times] base?=floats[n] n times? out>floats[n]", )

// In place: fn(x) * (base + scale * part `first` of the row of w of each token); bias: the parts' scales, for r8.  A
// token below 0 has row 0, that of padding.
STEP(blend, Blend, kRows, "x>floats[k] base=floats[k] w=matrix[n*times,k] kind?=any n k times? first? "
     "bias?=vector[n*times] scale? fn?",
     NEED(s.first < s.times && s.k <= kMaxWidth / s.times, "expected first below times, and k of a row")
     NEED(s.kind == kR32 || (s.kind == kR8 && s.bias >= 0), "expected rows: w, and bias for r8"))

// ---- matrices -------------------------------------------------------------------------------------------------------

// add: to the present values.
STEP(linear, Linear, kOwn, "act=acts[k] w=matrix[n,k] low?=low[n,k] plane? kind? n k bias?=vector[n] out>floats[n] "
     "add? rows?",
     NEED_PLANES(s.low)
     NEED(s.rows <= 1, "rows out of place"))

// fn(gate) * up, or fn(gate) without up.
STEP(glu, Glu, kOwn, "act=acts[k] gate=matrix[n,k] up?=matrix[n,k] gatelow?=low[n,k] uplow?=low[n,k] plane? "
     "bias?=vector[n] upbias?=vector[n] kind? n k out>next[n] fn?",
     NEED_PLANES(s.gatelow)
     NEED((s.kind == kP8 && s.up >= 0) == (s.uplow >= 0), "expected a low plane for p8 alone")
     NEED(s.up >= 0 || s.upbias < 0, "upbias without up")
     NEED(s.up >= 0 || s.fn != kSwigluOai, "fn out of place"))

// An LM head: rows first * R to (first + times) * R of the output are (y + bias) * scale, as cap * tanh(that / cap) if
// there is a cap.
STEP(logits, Logits, kOwn, "act=acts[k] w=matrix[n,k] low?=low[n,k] plane? kind? n k times? first? bias?=vector[n] "
     "scale? cap?",
     NEED_PLANES(s.low))

// The best k - first of the softmax of x [rows, n - first], or fn=sigmoid, times scale, add: over their sum; the last
// first ones always, by their sigmoid -> [rows, 2 k], weights and then numbers.  bias: added to what they are chosen
// by, not to weights; w: a factor of each expert's weight.
STEP(route, Route, kRows, "x=floats[n] n k out>floats[2*k] add? scale? first? fn? bias?=vector[n-first] w?=vector[n-first]",
     NEED(s.k <= s.n && s.n <= kMaxTimes, "expected k of n, at most 1024")
     NEED(s.first < s.k, "expected first below k")
     NEED(s.fn == kSilu || s.fn == kSigmoid, "fn out of place"))

// For the experts that route chose just before (x, heads of times): w (fn(gate) * up), weighted.  gatebias, upbias, bias:
// added to each product.  downkind: of w, of the same activations as kind.
STEP(experts, Experts, kOwn, "act=acts[k] x=floats[2*heads] gate=matrix[times*n,k] up=matrix[times*n,k] "
     "w=down[times*k,n] gatelow?=low[times*n,k] uplow?=low[times*n,k] low?=downlow[times*k,n] plane? kind? downkind? "
     "n k times? gatebias?=vector[times*n] upbias?=vector[times*n] bias?=vector[times*k] heads fn? out>floats[k] add?",
     NEED_PLANES(s.gatelow) NEED_PLANES(s.uplow) NEED_PLANES_OF(s.downkind, s.low)
     NEED(kKinds[s.kind].acts == kKinds[s.downkind].acts, "expected a downkind of the same activations as kind")
     NEED(s.n % kBlock == 0 && s.k % kTile == 0, "expected n and k of whole tiles")
     NEED(s.heads <= s.times, "expected heads of times"))

// ---- attention and states -------------------------------------------------------------------------------------------

// q, k, v of a layer; keys are rotated and appended to the cache with the values, queries wait for attend.  late: norms
// come after the rotation; growth [P]: factor of a query at that position; shared: only queries, for keys and values
// that an earlier step has appended for this layer.  From qx, kx and vx: those have been multiplied already.  memory:
// of the rows' memories; with shared=1 queries, else only keys and values, whose destinations are in `sources`.  axes:
// index of the row's position that rotates a pair of channels, 0, 1 or 2 (M-RoPE, arXiv 2409.12191).
STEP(heads, Heads, kOwn, "act?=acts[k] w?=matrix[made*tiled,k] low?=low[made*tiled,k] plane? kind? k? "
     "bias?=vector[made*dim] qx?=floats[heads*dim] kx?=floats[kv*dim] vx?=floats[kv*dim] dim heads kv rotary? cos?=table sin?=table axes?=vector[rotary/2] growth?=vector[seen] "
     "qnorm?=vector[dim] knorm?=vector[dim] vnorm?=vector[dim] late? eps? layer? scale? shared? memory?",
     NEED(s.qx >= 0 || (s.kind == kP8) == (s.low >= 0), "expected a low plane for p8 alone")
     NEED((s.qx < 0) == (s.kx < 0) && (s.qx < 0) == (s.vx < 0), "expected all of qx, kx and vx, or none")
     NEED(s.qx >= 0 || (s.act >= 0 && s.w >= 0 && s.k > 0), "expected act, w and k, or qx, kx and vx")
     NEED(s.heads % s.kv == 0, "expected heads, and kv that divide them")
     NEED(s.rotary <= s.dim && s.rotary % 2 == 0, "head size out of range")
     NEED(!s.rotary || (s.cos >= 0 && s.sin >= 0), "expected cos and sin")
     NEED(s.rotary || s.axes < 0, "axes without rotary")
     NEED(!s.shared || (s.qx < 0 && s.knorm < 0 && s.vnorm < 0), "expected queries alone")
     NEED(!s.memory || (s.qx < 0 && !s.rotary && s.growth < 0), "expected act and w for a memory, and no positions")
     NEED(!s.fills() || s.qnorm < 0, "expected keys and values alone"))

// -> floats; window: of what a row at position p sees, positions from p - window + 1 on only, 0: all; after: and up to
// p + after only, without it: all; cap: scores are cap * tanh(score / cap); relative: what is added to the score of a key d
// positions on from the row, for each head n numbers, of which that one is number at + d, or else the first or the last;
// memory: all that the row sees of its one; sinks: of each head a score that counts in the softmax, without a value.
STEP(attend, Attend, kOwn, "out>floats[heads*dim] layer? heads kv dim window? after? cap? relative?=vector[heads*n] n? "
     "at? memory? sinks?=vector[heads]",
     NEED((s.relative >= 0) == (s.n > 0) && s.at <= std::max(0, s.n - 1), "expected relative with n, and at within n")
     NEED(!s.memory || (!s.window && s.relative < 0), "expected neither a window nor relative for a memory"))

// x = b, c, v: out = c * (bias + sum over j of w[j] * (b * v of the token length - 1 - j before)), a row's own tokens
// by its parents, older ones from the cache's states; layer: which of those with states.
STEP(convolve, Convolve, kRows, "x=floats[3*k] k length layer? w=vector[length*k] bias?=vector[k] out>floats[k]",
     NEED(s.length > 1, "expected a length of at least 2"))

// A convolution of each channel over the row and the length - 1 rows of its slot before it in the pass: out = bias + sum
// over j of w[j] * x[row - (length - 1 - j)].  Rows of a text in order, which see nothing before the pass: an encoder's,
// or those of a block of draft tokens.  b: a row's own summands of the taps, for n groups of channels each, those of its
// own row's tap first; at: where those of this convolution begin.
STEP(depthwise, Depthwise, kRows, "x=floats[k] k length w=vector[length*k] bias?=vector[k] out>floats[k] "
     "b?=floats[2*length*n] n? at?",
     NEED(s.x != s.out, "expected another buffer for out")
     NEED((s.b >= 0) == (s.n > 0) && (s.b < 0 || s.b != s.out), "expected n with b, in another buffer than out")
     NEED(s.n ? s.k % s.n == 0 && s.at <= s.length * s.n : !s.at, "expected n groups of k, and at within b"))

// A gated delta rule: x = q, k [kv, dim], v [heads, n] before the short convolution w and silu; a, b: inputs of decay
// and of scale * betas, with bias and rate; out [rows, heads * n], each head normed and times silu(z).  up makes it a
// state space: decay and step come only from a, up times v is added, heads are not normed; upbias: of the convolution.
STEP(delta, Delta, kOwn, "x=floats[k] k z=floats[heads*n] a=floats[heads] b?=floats[heads] length layer? "
     "w=vector[length*k] bias=vector[heads] rate=vector[heads] norm?=vector[n] up?=vector[heads] upbias?=vector[k] "
     "eps? heads kv dim n out>floats[heads*n] scale?",
     NEED(s.length > 1, "expected a length of at least 2")
     NEED(s.heads % s.kv == 0, "expected heads, and kv that divide them")
     NEED(s.dim % kTile == 0 && s.n % kTile == 0 && s.n <= kMaxHeadDim, "expected dim and n that are multiples of 16")
     NEED(int64_t(s.heads) * s.dim * s.n <= kMaxWidth, "number out of range")
     NEED(s.k == 2 * s.kv * s.dim + s.heads * s.n, "expected k to be that of q, k and v")
     NEED(s.spaces() ? s.norm < 0 : s.norm >= 0 && s.b >= 0, "expected norm and b, or up"))

#undef STEP
#undef WEIGHT
#undef BUFFER
#undef NUMBER
#undef REAL
