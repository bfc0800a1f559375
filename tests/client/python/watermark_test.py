"""Texts drawn with a watermark are found by its key; the scores are those of the definition."""

import math
import unittest

import logitd
import numpy as np
from harness import ServerTestCase, TestCase
from logitd.watermark import Detection, _gamma_tail, detect

TEXT = [5, 17, 17, 5, 17, 17, 5, 100000, 0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]


class DetectTest(TestCase):
    def test_scores_are_those_of_the_definition(self):
        # tests/kernels/watermark_test.cc and tests/client/logitctl_test.cc have the same.
        for key, width, prompt, score, tokens, p_value in (
            (0, 1, 0, 17.389627309173395, 17, 0.4307008157722863),
            (0x0123456789ABCDEF, 4, 0, 22.07710071690334, 20, 0.30038781035465506),
            (2**64 - 1, 16, 3, 26.093049919835817, 17, 0.02384504441855623),
            (7, 2, 0, 11.885643065042796, 18, 0.9413125304443459),
        ):
            for text in (TEXT, np.array(TEXT), np.array(TEXT, np.uint64), tuple(TEXT)):
                found = detect(text, key, width, prompt_tokens=prompt)
                self.assertAlmostEqual(found.score, score, delta=1e-12)
                self.assertEqual(found.tokens, tokens)
                self.assertAlmostEqual(found.p_value, p_value, delta=1e-12)

    def test_a_text_without_tokens_that_count_says_nothing(self):
        for text, prompt in (([], 0), ([3], 1), ([3, 4], 5)):
            self.assertEqual(detect(text, 1, 4, prompt_tokens=prompt), Detection(0.0, 0, 1.0))

    def test_a_pair_counts_once(self):
        once = detect([9, 1, 2], 5, 2)
        again = detect([9, 1, 2, 9, 1, 2], 5, 2, prompt_tokens=3)
        self.assertEqual(detect([9, 1, 2] * 40, 5, 2).tokens, once.tokens + 2)
        self.assertEqual(again.tokens, 3)

    def test_p_values_are_those_of_the_gamma_distribution(self):
        for score in (0.1, 1.0, 3.0, 40.0, 700.0):
            self.assertAlmostEqual(_gamma_tail(1, score), math.exp(-score), delta=1e-12 * math.exp(-score))
            two = math.exp(-score) * (1 + score)
            self.assertAlmostEqual(_gamma_tail(2, score), two, delta=1e-12)
        # 0.05 and 0.001 of the chi-square distribution of 10 degrees.
        self.assertAlmostEqual(_gamma_tail(5, 18.307038 / 2), 0.05, delta=1e-7)
        self.assertAlmostEqual(_gamma_tail(5, 29.588298 / 2), 0.001, delta=1e-8)
        self.assertAlmostEqual(_gamma_tail(10**6, 1e6), 0.5, delta=1e-3)
        self.assertEqual(_gamma_tail(3, 0.0), 1.0)

    def test_bad_values_are_refused(self):
        for arguments, said in (
            (([1], 1, 0), "width: got 0"),
            (([1], 1, 17), "width: got 17"),
            (([1], -1, 4), "key: got -1"),
            (([1], 2**64, 4), "key: got 18446744073709551616"),
            (([1], 1, 4, -1), "prompt_tokens: got -1"),
            (([[1, 2]], 1, 4), "tokens: got 2 dimensions, allowed 1"),
            (([1, -2], 1, 4), "tokens: got -2"),
            (([0.5], 1, 4), "tokens: got"),
        ):
            with self.refused(logitd.InvalidArgument, said):
                detect(*arguments)


class DrawnTest(ServerTestCase):
    def test_drawn_texts_are_found_by_their_key(self):
        random = np.random.default_rng(4)
        prompt, texts = [3, 1, 4], [[3, 1, 4], [3, 1, 4]]
        with logitd.Client(self.server.unix) as client:
            for position in range(200):
                logits = random.standard_normal((2, 500)).astype(np.float32) * 2
                drawn = client.sample(
                    logits, seed=1, position=position, history=texts, watermark_key=99, watermark_width=[4, 0]
                )
                for text, token in zip(texts, drawn.tokens.tolist()):
                    text.append(token)
        marked, plain = (detect(text, 99, 4, prompt_tokens=len(prompt)) for text in texts)
        self.assertEqual((marked.tokens, plain.tokens), (200, 200))
        self.assertLess(marked.p_value, 1e-6)
        self.assertGreater(plain.p_value, 1e-4)
        self.assertGreater(detect(texts[0], 98, 4, prompt_tokens=len(prompt)).p_value, 1e-4)

    def test_no_seed_is_needed(self):
        logits = np.zeros((2, 3), np.float32)
        with logitd.Client(self.server.unix) as client:
            # The scores are 1.43, 0.93, -0.26, and after token 0 and 1 0.38, 1.94, -0.51.
            drawn = client.sample(logits, history=[[], [0, 1]], watermark_key=7, watermark_width=2)
            self.assertEqual(drawn.tokens.tolist(), [0, 1])
            with self.refused(logitd.InvalidArgument, "seed: got none with xtc_probability 0.5 at row 0"):
                client.sample(logits, watermark_key=7, watermark_width=2, xtc_probability=0.5)
            with self.refused(logitd.InvalidArgument, "draws: got 2 at row 0, allowed 0..1 with a watermark"):
                client.sample(logits, watermark_width=2, draws=2)


if __name__ == "__main__":
    unittest.main()
