-- devices.lua -- what NVIDIA's public documents say of some GPUs: peaks in TFLOP/s (a multiply-add is two; tensor cores dense, that is
-- half of what a sheet gives "with sparsity"), memory in GB/s and GB, multiprocessors, highest clock in MHz. By no means measured.
return {
  -- "NVIDIA H200 Tensor Core GPU" data sheet, the SXM column; multiprocessors and clock: "NVIDIA H100 Tensor Core GPU Architecture"
  -- (the same chip).
  h200 = { name = "NVIDIA H200 SXM", cc = 90, sms = 132, mhz = 1980, gb = 141, gb_per_s = 4800, f64 = 34, f32 = 67, tf32 = 494.5, half = 989.5 },
  -- "NVIDIA A100 Tensor Core GPU" data sheet, the 80GB SXM column; multiprocessors and clock: "NVIDIA A100 Tensor Core GPU
  -- Architecture".
  a100 = { name = "NVIDIA A100 80GB SXM", cc = 80, sms = 108, mhz = 1410, gb = 80, gb_per_s = 2039, f64 = 9.7, f32 = 19.5, tf32 = 156, half = 312 },
  -- "NVIDIA L40S" data sheet; f64 and multiprocessors: "NVIDIA Ada GPU Architecture" (a 64th of f32; 18,176 cores by 128).
  l40s = { name = "NVIDIA L40S", cc = 89, sms = 142, mhz = 2520, gb = 48, gb_per_s = 864, f64 = 1.43, f32 = 91.6, tf32 = 183, half = 362.05 },
  -- "NVIDIA Ampere GA102 GPU Architecture", the appendix on the GeForce RTX 3090; products of halves summed in f32.
  rtx3090 = { name = "NVIDIA GeForce RTX 3090", cc = 86, sms = 82, mhz = 1695, gb = 24, gb_per_s = 936, f64 = .556, f32 = 35.6, tf32 = 35.6, half = 71 },
}
