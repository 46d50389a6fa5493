// Where numbers of four bits lie: bricks of 32 rows by 128 k, told in boleinfer/nibbles.py.
#pragma once

#include "common.cuh"

constexpr int FEATURES = 32, K = 128, SHARING = 32;  // of a brick; neighbours with the same scale
constexpr int NUMBERS = FEATURES * K / 2;            // bytes; behind them are the scales, of rows g, g + 8, .. together
constexpr int BRICK = NUMBERS + FEATURES * K / SHARING * (int)sizeof(bf16);
