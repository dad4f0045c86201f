// Log-radial harmonics (Eq. 1 of the paper) and their steering (Eq. 3), as in scalesteer.harmonics. No page, only numbers.
// x grows to the right, y upwards, pixels have unit pitch; complex numbers are pairs of arrays, re and im.

export const ROUNDING = 1e-9; // 3.5 times 8/7 must count as 4

export function windowSize(kernelSize, scale, basis) {
  const radius = kernelSize / 2 * scale;
  if (basis.support === "averaged") return 2 * Math.ceil(radius - 0.5 - ROUNDING) + 1;
  return 2 * Math.floor(radius + ROUNDING) + 1;
}

// s^(m-2) e^(-i k log s), one for each order.
export function steeringFactors(basis, scale) {
  const size = scale ** (basis.m - 2), log = Math.log(scale);
  return basis.orders.map((k) => [size * Math.cos(k * log), -size * Math.sin(k * log)]);
}

// K(phi, phi_j), alone or with K(phi, phi_j + pi), for one orientation.
function lobe(basis, angle, towards) {
  const turn = 2 * Math.PI, d = Math.abs(((angle - towards + Math.PI) % turn + turn) % turn - Math.PI);
  const near = Math.exp(-((d / basis.sigma) ** 2) / 2), far = Math.exp(-(((Math.PI - d) / basis.sigma) ** 2) / 2);
  return basis.lobes === "single" ? near : basis.lobes === "sum" ? near + far : Math.max(near, far);
}

// What a filter is in polar coordinates: for each order the coefficients times the angular factors, as a Fourier series
// where there is a core, else orientation by orientation.
export function prepare(basis, coefficients) {
  if (!basis.core) return { basis, coefficients };
  const series = basis.series.map((a, n) => coefficients.map((row) => {
    let cosRe = 0, cosIm = 0, sinRe = 0, sinIm = 0;
    row.forEach(([re, im], j) => {
      const c = a * Math.cos(n * basis.orientations[j]), s = a * Math.sin(n * basis.orientations[j]);
      cosRe += c * re; cosIm += c * im; sinRe += s * re; sinIm += s * im;
    });
    return [cosRe, cosIm, sinRe, sinIm];
  }));
  return { basis, coefficients, series };
}

// For each order the value at a point of sum_j c_kj S_kj, into re[k] and im[k]; the core is `core` pixels.
export function atPoint({ basis, coefficients, series }, x, y, core, re, im) {
  const r = Math.hypot(x, y, core);
  for (let k = 0; k < basis.orders.length; k++) {
    let sumRe = 0, sumIm = 0;
    if (r === 0) { // Eq. 1 is undefined there; S(0) = 1
      for (const [a, b] of coefficients[k]) { sumRe += a; sumIm += b; }
      re[k] = sumRe; im[k] = sumIm;
      continue;
    }
    if (series) {
      const stepX = x / r, stepY = y / r; // (r/q)^n cos n phi and sin n phi are powers of this
      let cos = 1, sin = 0;
      for (let n = 0; n < series.length; n++) {
        const term = series[n][k];
        sumRe += term[0] * cos + term[2] * sin;
        sumIm += term[1] * cos + term[3] * sin;
        const next = cos * stepX - sin * stepY;
        sin = cos * stepY + sin * stepX;
        cos = next;
      }
    } else {
      const angle = Math.atan2(y, x);
      coefficients[k].forEach(([a, b], j) => {
        const weight = lobe(basis, angle, basis.orientations[j]);
        sumRe += a * weight; sumIm += b * weight;
      });
    }
    const log = Math.log(r), size = Math.exp(-basis.m * log), phase = basis.orders[k] * log + basis.beta;
    const c = size * Math.cos(phase), s = size * Math.sin(phase);
    re[k] = c * sumRe - s * sumIm;
    im[k] = c * sumIm + s * sumRe;
  }
}

// The real filter at a scale, at one point: the real part of Eq. 3, zero beyond a s.
export function filterAt(prepared, kernelSize, scale, x, y) {
  if (Math.hypot(x, y) > kernelSize / 2 * scale + ROUNDING) return 0;
  const re = [], im = [], factors = steeringFactors(prepared.basis, scale);
  atPoint(prepared, x, y, prepared.basis.core * scale, re, im);
  return factors.reduce((sum, [a, b], k) => sum + a * re[k] - b * im[k], 0);
}

// A filter on fixed places that is steered in a few multiplications for each: without a core nothing but the factors
// depends on the scale.
export class Places {
  constructor(prepared, kernelSize, xs, ys, values = null) {
    Object.assign(this, { prepared, kernelSize, xs, ys, count: xs.length, orders: prepared.basis.orders.length });
    this.out = new Float64Array(this.count);
    this.radii = Float64Array.from(xs, (x, i) => Math.hypot(x, ys[i]));
    if (prepared.basis.core) return;
    this.re = new Float64Array(this.count * this.orders);
    this.im = new Float64Array(this.count * this.orders);
    const re = [], im = [];
    for (let i = 0; i < this.count; i++) {
      if (values) values(i, re, im); else atPoint(prepared, xs[i], ys[i], 0, re, im);
      for (let k = 0; k < this.orders; k++) {
        this.re[i * this.orders + k] = re[k];
        this.im[i * this.orders + k] = im[k];
      }
    }
  }

  steer(scale) {
    const { out, orders } = this, factors = steeringFactors(this.prepared.basis, scale);
    const limit = this.kernelSize / 2 * scale + ROUNDING, core = this.prepared.basis.core * scale, re = [], im = [];
    for (let i = 0; i < this.count; i++) {
      let sum = 0;
      if (this.radii[i] <= limit) {
        if (core) atPoint(this.prepared, this.xs[i], this.ys[i], core, re, im);
        for (let k = 0; k < orders; k++) {
          const a = core ? re[k] : this.re[i * orders + k], b = core ? im[k] : this.im[i * orders + k];
          sum += factors[k][0] * a - factors[k][1] * b;
        }
      }
      out[i] = sum;
    }
    return out;
  }
}

// Coordinates of a square of `count` x `count` places that spans `width` pixels, row by row from the top.
export function squareOf(count, width) {
  const step = width / count, at = (i) => (i - (count - 1) / 2) * step;
  const xs = new Float64Array(count * count), ys = new Float64Array(count * count);
  for (let i = 0; i < count * count; i++) {
    xs[i] = at(i % count);
    ys[i] = -at(Math.floor(i / count));
  }
  return [xs, ys];
}

// Means over pixels of the functions (K, J, n, n, 2) as a function of a place in the largest window.
function meansOf(table, coefficients) {
  const area = table.side * table.side;
  return (i, re, im) => {
    let at = 2 * i;
    coefficients.forEach((row, k) => {
      re[k] = im[k] = 0;
      for (const [a, b] of row) {
        const x = table.values[at], y = table.values[at + 1];
        re[k] += a * x - b * y;
        im[k] += a * y + b * x;
        at += 2 * area;
      }
    });
  };
}

const FINER = 4; // points along a pixel for a mean over it, where there is no table of means

// The filter on the pixels of a network, at any scale up to `largest`.
export class PixelFilter {
  constructor(basis, coefficients, kernelSize, largest, table) {
    this.basis = basis;
    this.kernelSize = kernelSize;
    this.side = windowSize(kernelSize, largest, basis);
    const prepared = prepare(basis, coefficients), averaged = basis.sampling === "area";
    this.finer = averaged && basis.core ? FINER : 1;
    let values = null;
    if (averaged && !basis.core) {
      const lookUp = meansOf(table, coefficients), inset = (table.side - this.side) / 2;
      values = (i, re, im) => lookUp((Math.floor(i / this.side) + inset) * table.side + i % this.side + inset, re, im);
    }
    this.places = new Places(prepared, kernelSize, ...squareOf(this.side * this.finer, this.side), values);
  }

  // {side, values} of the window at a scale.
  at(scale) {
    const side = windowSize(this.kernelSize, scale, this.basis), inset = (this.side - side) / 2, { finer } = this;
    const fine = this.places.steer(scale), values = new Float64Array(side * side), wide = this.side * finer;
    for (let row = 0; row < side; row++) {
      for (let column = 0; column < side; column++) {
        let sum = 0;
        for (let i = 0; i < finer; i++) {
          const start = ((row + inset) * finer + i) * wide + (column + inset) * finer;
          for (let j = 0; j < finer; j++) sum += fine[start + j];
        }
        values[row * side + column] = sum / (finer * finer);
      }
    }
    return { side, values };
  }
}

// What other libraries do instead: the pixels of a filter at scale 1, enlarged by bilinear interpolation.
export function interpolated({ side, values }, scale) {
  const wide = 2 * Math.floor(side / 2 * scale + ROUNDING) + 1, out = new Float64Array(wide * wide);
  const value = (row, column) => row < 0 || column < 0 || row >= side || column >= side ? 0 : values[row * side + column];
  for (let i = 0; i < wide * wide; i++) {
    const row = (Math.floor(i / wide) - (wide - 1) / 2) / scale + (side - 1) / 2;
    const column = (i % wide - (wide - 1) / 2) / scale + (side - 1) / 2;
    out[i] = bilinear(value, row, column) / (scale * scale);
  }
  return { side: wide, values: out };
}

export function bilinear(value, row, column) {
  const top = Math.floor(row), left = Math.floor(column), down = row - top, right = column - left;
  return (1 - down) * ((1 - right) * value(top, left) + right * value(top, left + 1))
    + down * ((1 - right) * value(top + 1, left) + right * value(top + 1, left + 1));
}

// The response at every pixel of a square image, zero beyond its border.
export function respond(image, width, { side, values }, out = new Float32Array(width * width)) {
  const reach = (side - 1) / 2, padded = width + 2 * reach, ground = new Float32Array(padded * padded);
  for (let row = 0; row < width; row++) {
    ground.set(image.subarray(row * width, (row + 1) * width), (row + reach) * padded + reach);
  }
  out.fill(0);
  for (let i = 0; i < side; i++) {
    for (let j = 0; j < side; j++) {
      const weight = values[i * side + j];
      if (!weight) continue;
      for (let row = 0; row < width; row++) {
        const from = (row + i) * padded + j, to = row * width;
        for (let column = 0; column < width; column++) out[to + column] += weight * ground[from + column];
      }
    }
  }
  return out;
}

// The response at one pixel.
function respondAt(image, width, { side, values }, row, column) {
  const reach = (side - 1) / 2;
  let sum = 0;
  for (let i = Math.max(0, reach - row); i < Math.min(side, width + reach - row); i++) {
    const from = (row + i - reach) * width + column - reach;
    for (let j = Math.max(0, reach - column); j < Math.min(side, width + reach - column); j++) {
      sum += values[i * side + j] * image[from + j];
    }
  }
  return sum;
}

// The response, read at places that move outwards with the picture: `scale` times those of `offsets` from the centre.
export function readResponse(image, width, filter, scale, offsets, whole = null) {
  const centre = (width - 1) / 2, known = new Map();
  const value = (row, column) => {
    if (row < 0 || column < 0 || row >= width || column >= width) return 0;
    if (whole) return whole[row * width + column];
    const key = row * width + column;
    if (!known.has(key)) known.set(key, respondAt(image, width, filter, row, column));
    return known.get(key);
  };
  return offsets.map(([down, right]) => bilinear(value, centre + scale * down, centre + scale * right));
}

export function correlation(one, other) {
  const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length, a = mean(one), b = mean(other);
  let both = 0, first = 0, second = 0;
  one.forEach((value, i) => {
    const x = value - a, y = other[i] - b;
    both += x * y; first += x * x; second += y * y;
  });
  return first && second ? both / Math.sqrt(first * second) : 0;
}

// A picture of `side` x `side` numbers, enlarged about its centre and laid on a canvas, by cubic interpolation.
export function enlarge(picture, side, scale, width, out = new Float32Array(width * width)) {
  const weights = (t) => { // Catmull and Rom
    const u = 1 - t;
    return [-0.5 * t * u * u, 1 + t * t * (1.5 * t - 2.5), 1 + u * u * (1.5 * u - 2.5), -0.5 * u * t * t];
  };
  const places = Array.from({ length: width }, (_, i) => {
    const at = (i - (width - 1) / 2) / scale + (side - 1) / 2, first = Math.floor(at);
    return { first: first - 1, weights: weights(at - first), outside: at < -2 || at > side + 1 };
  });
  for (let row = 0; row < width; row++) {
    const down = places[row];
    for (let column = 0; column < width; column++) {
      const right = places[column];
      let sum = 0;
      if (!down.outside && !right.outside) {
        for (let i = 0; i < 4; i++) {
          const y = down.first + i;
          if (y < 0 || y >= side) continue;
          for (let j = 0; j < 4; j++) {
            const x = right.first + j;
            if (x >= 0 && x < side) sum += down.weights[i] * right.weights[j] * picture[y * side + x];
          }
        }
      }
      out[row * width + column] = Math.min(1, Math.max(0, sum));
    }
  }
  return out;
}
