-- What wrk saw, as a line of JSON: times in milliseconds.
function done(summary, latency, requests)
  local failed = summary.errors
  io.write(string.format('\nJSON {"requests": %d, "seconds": %f, "p50": %f, "p99": %f, "failed": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    failed.connect + failed.read + failed.write + failed.status + failed.timeout))
end
