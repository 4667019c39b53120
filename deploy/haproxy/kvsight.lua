-- Sends each request to the server that kvsight chooses. The names of servers are those of their workers in kvsight.
-- Without an answer in time, HAProxy balances as its configuration says. It asks through the proxy `kvsight` of the
-- configuration. Load it with `lua-load-per-thread`: HAProxy 2.6 crashes or hangs now and then if threads share a filter.

local PROXY = os.getenv("KVSIGHT_PROXY")
local FAILURES, SILENT_S = 3, 1 -- after so many without an answer between them, the service is not asked for so long
local MOST_NOTED = 4096
-- fields by which callers could choose a worker: of two fields with one name the last one counts
local NOT_OF_CALLERS = '"pinned_worker":null,"affinity_target":null,"router_config_override":null,'
    .. '"priority_jump":0,"strict_priority":0'

local noted = {} -- what the service is still to be told
local failures, silent_until = 0, 0
local count, prefix = 0, string.format("haproxy-%x-%d-%s", os.time(), core.thread, tostring({}):match("0x(%x+)"))

local function ask(method, path, body)
    local client = core.httpclient()
    local headers = { ["content-type"] = { "application/json" } }
    return client[method](client, { url = "http://kvsight" .. path, dst = PROXY, headers = headers, body = body })
end

local function note(method, path)
    if #noted < MOST_NOTED then -- otherwise the booking ends after the service's time-to-live
        table.insert(noted, { method, path })
    end
end

core.register_task(function()
    while true do
        local waiting = noted
        noted = {}
        for _, each in ipairs(waiting) do
            ask(each[1], each[2])
        end
        core.msleep(10)
    end
end)

-- Returns the names of the servers that take new requests, as the items of a JSON array.
local function candidates(backend)
    local names = {}
    for name, server in pairs(core.backends[backend].servers) do
        local status = server:get_stats().status -- others: DOWN, DRAIN, MAINT, NOLB
        if status:find("^UP") or status == "no check" then
            table.insert(names, '"' .. name .. '"')
        end
    end
    return table.concat(names, ",")
end

core.register_action("kvsight", { "http-req" }, function(txn)
    local body = txn.sf:req_body()
    local last = body:find("}%s*$")
    if not last or #body < (tonumber(txn.sf:req_body_size()) or 0) or core.now().sec < silent_until then
        return
    end
    count = count + 1
    local id = prefix .. "-" .. count
    local own = string.format('"selection_id":"%s","allowed_worker_ids":[%s]', id, candidates(txn.f:be_name()))
    local asked = body:sub(1, last - 1) .. "," .. NOT_OF_CALLERS .. "," .. own .. "}"
    local answer = ask("post", "/select_and_reserve", asked)
    if answer.status == 200 then
        failures = 0
        txn:set_var("txn.kvsight_id", id)
        txn:set_var("txn.kvsight_worker", answer.body:match('"worker_id":"?([^",}]+)'))
    elseif not (answer.headers["content-type"] or { [0] = "" })[0]:find("^application/") then -- the proxy's own answer
        failures = failures + 1
        silent_until = failures >= FAILURES and core.now().sec + SILENT_S or 0
        note("delete", "/reservations/" .. id) -- it may be booked all the same
    end
end)

-- Follows a booked request: its first bytes end the prefill, and its end, for whatever reason, ends the booking.
local Booking = { id = "kvsight", flags = filter.FLT_CFG_FL_HTX }
Booking.__index = Booking

function Booking:new()
    return setmetatable({}, Booking)
end

function Booking:start_analyze(_, channel)
    if channel:is_resp() then
        filter.register_data_filter(self, channel)
    end
end

function Booking:http_payload(txn, message)
    local id = not self.is_complete and txn:get_var("txn.kvsight_id")
    if id and message.channel:is_resp() then
        self.is_complete = true
        note("post", "/reservations/" .. id .. "/prefill_complete")
    end
end

function Booking:end_analyze(txn, channel)
    local id = channel:is_resp() and txn:get_var("txn.kvsight_id")
    if id then
        note("delete", "/reservations/" .. id)
    end
end

core.register_filter("kvsight", Booking, function(booking)
    return booking
end)
