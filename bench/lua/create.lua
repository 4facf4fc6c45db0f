-- Create streams 0 to count - 1, each once, and end. Arguments: path prefix, count, bytes of the first message.
-- Run with one thread. wrk itself would go on until its time is up, so this reports and leaves on its own;
-- bench/load.py takes the time (microseconds 0).
require("report")

local prefix, count, body
local sent, answered, refused = 0, 0, 0

function init(arguments)
  prefix, count = arguments[1], tonumber(arguments[2])
  body = string.rep("x", tonumber(arguments[3]))
  wrk.headers["Content-Type"] = "application/octet-stream"
end

local is_rehearsal = true

function request()
  if is_rehearsal then
    -- wrk asks once before it starts and sends that nowhere.
    is_rehearsal = false
    return wrk.format("PUT", prefix .. 0, nil, body)
  end
  -- Connections that are idle at the end ask for the last stream again: creation is idempotent.
  local index = math.min(sent, count - 1)
  sent = sent + 1
  return wrk.format("PUT", prefix .. index, nil, body)
end

function response(status)
  answered = answered + 1
  if status > 299 then
    refused = refused + 1
    io.stderr:write("creation was answered " .. status .. "\n")
  end
  if answered >= count then
    io.write(string.format(
      'RESULT {"requests":%d,"microseconds":0,"bytes":0,"p50_us":0,"p99_us":0,"max_us":0,'
        .. '"refused":%d,"connect":0,"read":0,"write":0,"timeout":0}\n',
      answered, refused
    ))
    io.flush()
    os.exit(0)
  end
end
