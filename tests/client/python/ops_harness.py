"""Parts that the tests of logitd.ops share. Skips them where torch or the library is missing."""

import unittest

try:
    import torch
    from logitd import ops
except ImportError as missing:
    raise unittest.SkipTest(str(missing)) from None
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 4):
    raise unittest.SkipTest(f"torch: got {torch.__version__}, allowed 2.4 or newer")

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The error of a gradient that is rounded to the dtype, beside the largest of its tensor.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def double(tensor):
    """A copy in float64 of what the tensor holds, with a gradient where it has one."""
    return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)


class OpsTestCase(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(7)

    def assert_close(self, got, expected, tolerance, note=None):
        """Within `tolerance` of the largest expected element, or of 1."""
        got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
        self.assertEqual(got.shape, expected.shape, note)
        self.assertTrue(torch.equal(got.isfinite(), expected.isfinite()), note)
        finite = expected.isfinite()
        if finite.any():
            off = (got[finite] - expected[finite]).abs().max().item()
            self.assertLessEqual(off, tolerance * max(1.0, expected[finite].abs().max().item()), note)
        same = got[~finite].nan_to_num(nan=7.0) == expected[~finite].nan_to_num(nan=7.0)
        self.assertTrue(same.all(), note)


__all__ = ["DEVICES", "DTYPES", "OpsTestCase", "TOLERANCE", "double", "ops", "torch"]
