// Whether counts are as likely as they should be.
#ifndef LOGITD_TESTS_KERNELS_CHI_SQUARE_H_
#define LOGITD_TESTS_KERNELS_CHI_SQUARE_H_

#include <cmath>

namespace logitd::testing {

// The chance that a chi-square variable of `freedom` degrees exceeds x: the regularised upper
// incomplete gamma function Q(freedom / 2, x / 2), by its series or its continued fraction.
inline double ChiSquareTail(double x, double freedom) {
  const double a = freedom / 2, z = x / 2;
  const double scale = std::exp(-z + a * std::log(z) - std::lgamma(a));
  if (z < a + 1) {
    double term = 1 / a, sum = term;
    for (double n = a + 1; term > sum * 1e-16; ++n) sum += term *= z / n;
    return 1 - sum * scale;
  }
  double b = z + 1 - a, c = 1e300, d = 1 / b, h = d;
  for (int i = 1; i < 1000; ++i) {
    const double an = -i * (i - a);
    b += 2;
    d = 1 / (an * d + b);
    c = b + an / c;
    h *= d * c;
    if (std::fabs(d * c - 1) < 1e-15) break;
  }
  return scale * h;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CHI_SQUARE_H_
