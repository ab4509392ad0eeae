-- What wrk sends: POST /v1/certificates with plans that differ in their noise, `kinds` of them in turn.
-- Arguments: the token, the plan's text with NOISE in it, the first noise in millionths, and `kinds`.
local head, before, after, first, kinds
local sent = 0

function init(args)
  head = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. args[1] }
  before, after = args[2]:match("^(.*)NOISE(.*)$")
  first, kinds = tonumber(args[3]), tonumber(args[4])
end

function request()
  local noise = string.format("%.6f", (first + sent % kinds) / 1e6)
  sent = sent + 1
  return wrk.format("POST", "/v1/certificates", head, before .. noise .. after)
end

dofile(debug.getinfo(1, "S").source:match("^@?(.*/)") .. "report.lua")
