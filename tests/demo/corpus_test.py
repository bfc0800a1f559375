"""What demo/check_model.py and demo/train.py print of a loss."""

import math
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "demo"))

import corpus


class PerplexityTest(unittest.TestCase):
    def test_is_exp_of_the_loss(self):
        for loss, want in ((0, 1), (math.log(70.8), 70.8), (math.log(sys.float_info.max / 2), sys.float_info.max / 2)):
            self.assertAlmostEqual(corpus.perplexity(loss) / want, 1, places=12)

    def test_is_infinite_above_every_double(self):
        for loss in (709.79, 800, 1e300, math.inf):
            self.assertEqual(corpus.perplexity(loss), math.inf)

    def test_of_no_number_is_none(self):
        self.assertTrue(math.isnan(corpus.perplexity(math.nan)))


if __name__ == "__main__":
    unittest.main()
