-- test_autograd.lua -- gradients as scripts see them.
local t = require "harness"
local ddp = require "ddp"

t.test("gradients add up over backwards and over uses", function()
  local x = ddp.tensor({ 1, 2, 3 }, { requires_grad = true })
  t.ok(x.grad == nil, "nil until reached");
  (x * x):sum():backward()
  t.eq(x.grad:tolist(), { 2, 4, 6 });
  (x * 2 + x):sum():backward()
  t.eq(x.grad:tolist(), { 5, 7, 9 })
  x.grad = nil
  t.ok(x.grad == nil)
end)
t.test("a second backward through a used graph is refused unless it was retained", function()
  local x = ddp.ones(2, { requires_grad = true })
  local y = (x * x):sum()
  y:backward { retain_graph = true }
  y:backward()
  t.eq(x.grad:tolist(), { 4, 4 })
  t.fails(function() y:backward() end, "retain_graph")
end)
t.test("backward refuses a saved tensor that was changed in place, naming the op", function()
  local x = ddp.ones(3, { requires_grad = true })
  local a = x * 2
  local y = a * a
  a:add_(1)
  t.fails(function() y:sum():backward() end, "mul saved its input a, which was changed in place")
end)
t.test("in place on a leaf or a view inside a graph is refused outside no_grad", function()
  local x = ddp.ones(3, { requires_grad = true })
  t.fails(function() x:add_(1) end, "a leaf that needs a gradient")
  ddp.no_grad(function() x:add_(1) end)
  t.eq(x:tolist(), { 2, 2, 2 })
  local v = (x * 2):view(3, 1)
  t.fails(function() v:mul_(x:view(3, 1)) end, "a view")
end)
t.test("in place inside a graph takes part in it", function()
  local x = ddp.tensor({ 1, 2 }, { requires_grad = true })
  local a = x * 3
  a:add_(x)
  a:sum():backward()
  t.eq(x.grad:tolist(), { 4, 4 })
end)
t.test("no_grad records nothing, is restored on errors, and passes values through", function()
  local x = ddp.ones(2, { requires_grad = true })
  local y, n = ddp.no_grad(function(a, b) return a * 2, b end, x, 5)
  t.ok(not y.requires_grad and n == 5)
  pcall(ddp.no_grad, function() error "x" end)
  t.ok((x * 2).requires_grad)
end)
t.test("ddp.grad leaves the leaves alone and can differentiate twice", function()
  local x = ddp.tensor({ 2 }, { requires_grad = true })
  local g = ddp.grad({ (x ^ 3):sum() }, { x }, { create_graph = true })[1]
  t.eq(g:tolist(), { 12 })
  t.eq(ddp.grad({ g:sum() }, { x })[1]:tolist(), { 12 })
  t.ok(x.grad == nil)
  local z = ddp.ones(1, { requires_grad = true })
  t.fails(function() ddp.grad({ (x * 2):sum() }, { z }) end, "not used")
  t.ok(ddp.grad({ (x * 2):sum() }, { z }, { allow_unused = true })[1] == nil)
end)
t.test("hooks see and may replace gradients, and can be removed", function()
  local x = ddp.ones(2, { requires_grad = true })
  local y = x * 3
  local seen
  local h = y:register_hook(function(g) seen = g:tolist() return g * 10 end)
  y:sum():backward()
  t.eq(seen, { 1, 1 })
  t.eq(x.grad:tolist(), { 30, 30 })
  h:remove()
  x.grad = nil
  local h2 = x:register_hook(function(g) return g * 2 end)
  local after
  x:register_post_accumulate_grad_hook(function(p) after = p.grad:tolist() end);
  (x * 3):sum():backward()
  t.eq(x.grad:tolist(), { 6, 6 })
  t.eq(after, { 6, 6 })
  h2:remove()
end)
t.test("an error in a hook reaches the caller and leaves no state", function()
  local x = ddp.ones(2, { requires_grad = true })
  local y = x * 3
  y:register_hook(function() error "from a hook" end)
  t.fails(function() y:sum():backward() end, "from a hook")
  t.eq(ddp.ones(1):item(), 1)
end)
t.test("non-scalars need a gradient, and its shape must fit", function()
  local x = ddp.ones(3, { requires_grad = true })
  t.fails(function() (x * 2):backward() end, "take the mean or sum first")
  t.fails(function() (x * 2):backward(ddp.ones(2)) end, "[2]");
  (x * 2):backward(ddp.tensor { 1, 2, 3 })
  t.eq(x.grad:tolist(), { 2, 4, 6 })
  t.fails(function() ddp.ones(1):backward() end, "does not depend on anything")
end)
t.test("assigning p.grad is checked", function()
  local x = ddp.ones(3, { requires_grad = true })
  t.fails(function() x.grad = ddp.ones(2) end, "grad: is [2], its tensor [3]")
  x.grad = ddp.ones(3)
  t.eq(x.grad:tolist(), { 1, 1, 1 })
end)
t.test("a chain of 100,000 ops is walked and freed without recursion", function()
  local x = ddp.ones(1, { requires_grad = true })
  local y = x
  for _ = 1, 100000 do y = y + 1 end
  y:sum():backward()
  t.eq(x.grad:tolist(), { 1 })
end)
t.test("gradcheck accepts a right gradient", function()
  local x = ddp.randn(3, 2, { dtype = "f64", requires_grad = true })
  t.ok(ddp.gradcheck(function(a) return (a * a):tanh() end, { x }))
end)

t.test("a gradient that two inputs share is not added to in place", function()
  local a, b = ddp.ones(3):requires_grad_(true), ddp.ones(3):requires_grad_(true)
  local p, q = a * 1, b * 1
  local d = p * 2
  local loss = ((p + q) * 3):sum() + d:sum() -- p and q get one tensor; p adds d's share to it
  loss:backward()
  t.eq(a.grad:tolist(), { 5, 5, 5 })
  t.eq(b.grad:tolist(), { 3, 3, 3 })
end)
t.test("leaves that are given one gradient keep one each", function()
  local a, b = ddp.ones(3):requires_grad_(true), ddp.ones(3):requires_grad_(true)
  for n = 1, 2 do
    ((a + b) * 3):sum():backward()
    t.eq(a.grad:tolist(), { 3 * n, 3 * n, 3 * n })
    t.eq(b.grad:tolist(), { 3 * n, 3 * n, 3 * n })
  end
end)
t.done()
