-- Sends each request to the engine that kvsight chooses, and in turn without an answer in time.

local balancer = require "ngx.balancer"
local json = require "cjson.safe"

local DEADLINE_MS = 250
local MOST_TRIES, AWAY_S = 3, 5 -- an engine that cannot be reached gets no requests for so long
local FAILURES, SILENT_S = 3, 1 -- after so many without an answer between them, the service is not asked for so long
local MOST_BODY_BYTES = 8 * 1024 * 1024
-- fields by which callers could choose a worker: of two fields with one name the last one counts
local NOT_OF_CALLERS = '"pinned_worker":null,"affinity_target":null,"router_config_override":null,'
    .. '"priority_jump":0,"strict_priority":0'

local Kvsight = {}
Kvsight.__index = Kvsight

-- options: `host` and `port` of kvsight, perhaps a `token`, and `engines`: name of a worker -> "IP:PORT".
local function new(options)
    local names = {}
    for name in pairs(options.engines) do
        names[#names + 1] = name
    end
    table.sort(names)
    local made = { options = options, names = names, turn = 0, count = 0, failures = 0, silent_until = 0, away = {} }
    return setmetatable(made, Kvsight)
end

-- Returns the status and the body of an answer, or nil.
function Kvsight:ask(method, path, body)
    local socket = ngx.socket.tcp()
    socket:settimeouts(DEADLINE_MS, DEADLINE_MS, DEADLINE_MS)
    if not socket:connect(self.options.host, self.options.port) then
        return nil
    end
    local token = self.options.token
    local head = { method, " ", path, " HTTP/1.1\r\nHost: ", self.options.host, "\r\nContent-Type: application/json",
        "\r\nContent-Length: ", body and #body or 0, token and "\r\nAuthorization: Bearer " .. token or "", "\r\n\r\n" }
    socket:send({ head, body or "" })
    local answer = socket:receiveuntil("\r\n\r\n")()
    local size = answer and tonumber(answer:lower():match("\ncontent%-length: (%d+)"))
    local content = size and (size == 0 and "" or socket:receive(size))
    if not content then
        socket:close()
        return nil
    end
    socket:setkeepalive(4000, 64)
    return tonumber(answer:match("^%S+ (%d+)")), content
end

-- Returns the engines that could be reached lately, or all.
function Kvsight:present()
    local found = {}
    for _, name in ipairs(self.names) do
        if (self.away[name] or 0) <= ngx.now() then
            found[#found + 1] = name
        end
    end
    return #found > 0 and found or self.names
end

-- Sends a call in the background.
function Kvsight:note(method, path)
    ngx.timer.at(0, function()
        self:ask(method, path)
    end)
end

-- For `access_by_lua`: chooses engines and books the request.
function Kvsight:choose()
    local present, order = self:present(), {}
    for number = 0, #present - 1 do
        order[number + 1] = present[(self.turn + number) % #present + 1]
    end
    self.turn = self.turn + 1
    ngx.ctx.order, ngx.ctx.tried = order, 0
    ngx.req.read_body()
    local file = ngx.req.get_body_file()
    local source = file and io.open(file, "rb")
    local text = source and source:read(MOST_BODY_BYTES + 1) or ngx.req.get_body_data()
    if source then
        source:close()
    end
    local body = text and #text <= MOST_BODY_BYTES and json.decode(text)
    if type(body) ~= "table" or ngx.now() < self.silent_until then
        return
    end
    self.count = self.count + 1
    local id = string.format("nginx-%s-%d-%d-%d", ngx.var.hostname, ngx.worker.pid(), ngx.time(), self.count)
    local own = json.encode({ selection_id = id, allowed_worker_ids = present, explain = true })
    local asked = text:gsub("}%s*$", "") .. "," .. NOT_OF_CALLERS .. "," .. own:sub(2)
    local status, answer = self:ask("POST", "/select_and_reserve", asked)
    local selection = status == 200 and json.decode(answer)
    if selection then
        self.failures = 0
        ngx.ctx.booked = id
        local best = { selection, unpack(selection.candidates or {}) }
        for number = #best, 1, -1 do
            local name = tostring(best[number].worker_id)
            if self.options.engines[name] then
                table.insert(order, 1, name)
            end
        end
    elseif not status then
        self.failures = self.failures + 1
        self.silent_until = self.failures >= FAILURES and ngx.now() + SILENT_S or 0
        self:note("DELETE", "/reservations/" .. id) -- it may be booked all the same
    end
end

-- For `balancer_by_lua`: takes the next engine.
function Kvsight:balance()
    local context = ngx.ctx
    if context.engine then
        self.away[context.engine] = ngx.now() + AWAY_S
    elseif #context.order > 1 then
        balancer.set_more_tries(MOST_TRIES - 1)
    end
    repeat
        context.tried = context.tried + 1
        context.engine = context.order[context.tried]
    until not context.engine or (self.away[context.engine] or 0) <= ngx.now()
    local address = self.options.engines[context.engine or self.names[1]]
    balancer.set_current_peer(address:match("^(.*):(%d+)$"))
end

-- For `body_filter_by_lua`: the first bytes of an answer end the prefill.
function Kvsight:follow()
    if ngx.ctx.booked and not ngx.ctx.is_complete then
        ngx.ctx.is_complete = true
        self:note("POST", "/reservations/" .. ngx.ctx.booked .. "/prefill_complete")
    end
end

-- For `log_by_lua`: the request has ended, for whatever reason.
function Kvsight:release()
    if ngx.ctx.booked then
        self:note("DELETE", "/reservations/" .. ngx.ctx.booked)
    end
end

return { new = new }
