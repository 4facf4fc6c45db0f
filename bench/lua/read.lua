-- One request over and over. Arguments: method, path, "close" for a connection each or "keep".
require("report")

function init(arguments)
  wrk.method = arguments[1]
  wrk.path = arguments[2]
  if arguments[3] == "close" then
    wrk.headers["Connection"] = "close"
  end
end
