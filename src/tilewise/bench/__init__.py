"""Measuring: one loop (measure), the problems (workloads), what they are compared with (peers, ceilings, bars,
prefill), and what becomes of the numbers (records, tables, sweep, plots). Peers are found, never required."""
