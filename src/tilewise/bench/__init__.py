"""Measuring: one loop (measure), the problems (workloads), what they are compared with (peers, ceilings, bars,
prefill), and what becomes of the numbers (records, tables, sweep, plots; report: a page to send; tune: tables that
calls look up). Peers are found, never required."""
