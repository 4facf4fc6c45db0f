-- POST messages to streams chosen at random. Arguments: path prefix, streams, bytes.
-- The bodies differ and compress about two to one, as text does: what is flushed is compressed.
require("report")

local BODIES = 512

function init(arguments)
  local prefix, streams, bytes = arguments[1], tonumber(arguments[2]), tonumber(arguments[3])
  math.randomseed(os.time())
  local rests = {}
  for index = 1, BODIES do
    local digits = {}
    for at = 1, bytes do
      digits[at] = string.format("%x", math.random(0, 15))
    end
    rests[index] = " HTTP/1.1\r\nHost: bench\r\nContent-Type: application/octet-stream\r\nContent-Length: "
      .. bytes .. "\r\n\r\n" .. table.concat(digits)
  end
  local first = "POST " .. prefix
  request = function()
    return first .. math.random(0, streams - 1) .. rests[math.random(BODIES)]
  end
end
