-- POST messages of one size to a number of streams in turn. Arguments: path prefix, streams, bytes.
require("report")

function init(arguments)
  local prefix, streams, bytes = arguments[1], tonumber(arguments[2]), tonumber(arguments[3])
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/octet-stream"
  wrk.body = string.rep("x", bytes)
  wrk.path = prefix .. "0"
  if streams > 1 then
    -- Formatted beforehand, so that Lua only picks a string for each request.
    local prepared = {}
    for index = 1, streams do
      prepared[index] = wrk.format("POST", prefix .. (index - 1))
    end
    local index = 0
    request = function()
      index = index % streams + 1
      return prepared[index]
    end
  end
end
