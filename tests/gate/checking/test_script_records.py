"""What becomes of private records: rows of one record each, that meet in no loss before a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from affidavit.importers.partial_plan import PartialPlan
from affidavit.importers.scripts import importer
from affidavit.plan import MalformedPlan
from tests.gate.checking.script_codes import is_right, is_stopped, with_names

HEAD = """\
import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset
from opacus import PrivacyEngine
seen = []
"""
PRIVATE = """\
loader = DataLoader(data, batch_size=6)
other = SGD(body.parameters())
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=m, optimizer=o, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
"""
FRAME = """\
df = pd.read_csv("a.csv")
df["a"] = df["a"] - df["a"].mean()
"""
OWN = """\
class Own:
    def __init__(self, x):
        self.x = {init}
    def __getitem__(self, i):
        return {item}
data = Own(X)
"""
LOOP = """\
for e in range(3):
    for x, y in loader:
        {row}
        out = model(x)
        loss = criterion(out, y)
        {loss}
        loss.backward()
        optimizer.step()
        {after}
"""


def text_of(data: str = "pass", row: str = "pass", loss: str = "pass", after: str = "pass") -> str:
    return HEAD + data + "\n" + PRIVATE + LOOP.format(row=row, loss=loss, after=after)


def read(**parts: str) -> PartialPlan:
    partial = importer.read(with_names(text_of(**parts)).encode())
    assert partial is not None
    return partial


@pytest.mark.parametrize(
    "data",
    [
        "X = np.repeat(X, 3, axis=0)\ndata = Rows(X)",
        "X = np.tile(X, (3, 1))\ndata = Rows(X)",
        "X = np.concatenate([X, X + noise])\ndata = Rows(X)",
        "X = np.r_[X, X]\ndata = Rows(X)",
        "data.rows = torch.cat([X, X])",
        "df = pd.concat([df, df[df.y == 1]])\ndata = Rows(df)",
        "def rows():\n    return Rows(df.sample(n=9, replace=True))\ndata = rows()",
        "from sklearn.utils import resample\ndata = Rows(resample(X))",
        "data = data + data",
        "data = data.concatenate(data)",
        "data = list(zip(X, y)) * 3",
        "data = ConcatDataset([data] * 4)",
        "index = np.random.choice(9, 9)\ndata = Subset(data, index)",
        "data = Subset(data, torch.randint(0, 9, (9,)))",
        "data = concatenate_datasets([load(), load()])",
        OWN.format(init="np.concatenate([x, x])", item="self.x[i]"),
        OWN.format(init="x", item="self.x[i // 4]"),
        OWN.format(init="x", item="self.x[i % len(self.x), 0]"),
        OWN.format(init="x", item="(self.x[i] + self.x[random.randrange(9)]) / 2"),
    ],
)
def test_a_record_that_is_in_several_rows_is_not_certified(data: str) -> None:
    assert is_stopped(text_of(data=data))


@pytest.mark.parametrize(
    "data",
    [
        "X = np.repeat(np.arange(9), 3)\ndata = Rows(X)",
        "X = np.repeat(X, 3, axis=1)\ndata = Rows(X)",
        "X = np.concatenate([X[:9], X[10:]])\ndata = Rows(X)",
        "X = np.r_[X[:9], X[10:]]\ndata = Rows(X)",
        "df = pd.concat([df, pd.get_dummies(df)], axis=1)\ndata = Rows(df)",
        "data = MNIST(transform=Compose([Lambda(lambda x: x.repeat(3, 1, 1))]))",
        "data = ConcatDataset([first, second])",
        "index = np.random.choice(9, 9, replace=False)\ndata = Subset(data, index)",
        "data = Rows(torch.randint(0, 9, (9,)))",
        "unused = np.repeat(X, 3)",
        OWN.format(init="x", item="self.x[i // 9][i % 9]"),
        OWN.format(init="x", item="self.x[i][randint(0, 9):]"),
        "X = np.concatenate([np.zeros(3), X, np.zeros(3)])\ndata = Rows(X)",
    ],
)
def test_a_record_that_is_in_one_row_is(data: str) -> None:
    assert is_right(text_of(data=data), faulty=False)


@pytest.mark.parametrize(
    "row",
    [
        "x, y = torch.cat([x, x.flip(-1)]), torch.cat([y, y])",
        "x, y = x.repeat(4, 1), y.repeat(4)",
        "x = x.repeat_interleave(4, dim=0)",
        "x = torch.stack([x, x + 1]).flatten(0, 1)",
        "x = torch.stack([x, x + 1]); x = x.flatten(0, 1)",
        "x = x.expand(3, -1, -1).reshape(-1, 9)",
        "import einops; x = einops.repeat(x, 'b d -> (r b) d', r=3)",
        "import einops; x = einops.rearrange(x, 'b v d -> (b v) d')",
        "x = x.flatten(0, 1)",
        "x = f(x, x[torch.randperm(9)])",
        "x = x + keeper.last; keeper.last = x",
        "x = a * x + (1 - a) * x[torch.randperm(len(x))]",
        "i = torch.randperm(len(x)); z = x[i]; x = a * x + (1 - a) * z",
        "i = torch.randperm(len(x)); x[:, :9] = x[i, :9]",
        "x = a * x + (1 - a) * x.roll(1, 0)",
        "x = torch.cat([x, kept]); kept = x",
        "seen.append(x); x = x + seen[0]",
        "a, b = x.chunk(2); x = a - b",
    ],
)
def test_a_lot_whose_rows_are_of_several_records_is_not_certified(row: str) -> None:
    assert is_stopped(text_of(row=row))


@pytest.mark.by_turns
@pytest.mark.parametrize(
    "loss",
    [
        "z = out; loss = loss + (z @ z.T).logsumexp(1).mean()",
        "loss = loss + torch.mm(out, out.t()).mean()",
        "loss = loss + torch.cdist(out, out).mean()",
        "loss = loss + out.var(0).mean()",
        "loss = criterion(torch.stack([out for out in out - out.mean(0)]), y)",
        "loss = loss / out[out > 0].size(0)",
        "loss = loss / out[out > 0].shape[0]",
        "loss = criterion(out.view(len(out) // 2, -1), y)",
        "loss = pow(loss, 2)",
        "loss = criterion(torch.einsum('bi,ib->b', out, out), y)",
        "loss = criterion(out / out.norm(1), y)",
        "loss = criterion(out.chunk(2)[0], y)",
        "loss = (loss * y).sum() / y.sum()",
        "loss = F.cross_entropy(out, y, reduction='none').max()",
        "each = F.cross_entropy(out, y, reduction='none'); loss = each.topk(3)[0].mean()",
        "loss = CE(out, y).topk(3)[0].mean()",
        "loss = Own()(out, y)",
        "loss = loss + f(model(rows))",
        "loss = loss + f(model(next(iter(loader))))",
        "loss = loss + torch.softmax(out, 0).pow(2).mean()",
        "loss = loss + torch.einsum('bi,bj->ij', out, out).pow(2).sum()",
        "loss = loss + (out[None] - out[:, None]).pow(2).mean()",
        "loss = loss + F.cosine_similarity(out.unsqueeze(0), out.unsqueeze(1), -1).mean()",
        "loss = (f(out, y) / torch.bincount(y)[y]).mean()",
        "loss = loss * (y == 1).sum()",
        "loss = loss / loss.detach()",
        "loss = torch.sqrt(loss)",
        "loss = (loss - 0.1).abs() + 0.1",
        "loss = min(loss, 5)",
        "if loss > 3: loss = 0 * loss",
        "loss = loss + spread(out)",
        "loss = own(out, y)",
        "loss = loss + out.logsumexp(0).mean()",
        "loss = F.nll_loss(F.log_softmax(out, 0), y)",
        "each = CE(out, y); loss = each[each < each.mean()].mean()",
        "loss = loss + (out - sum(out) / len(out)).abs().mean()",
        "std = torch.std; loss = criterion(out / std(out), y)",
        "mid = lambda t: t - t.mean(0); loss = criterion(mid(out), y)",
        "z = (lambda: model(x))(); loss = criterion(z - z.mean(0), y)",
        "out.sub_(out.mean(0)); loss = criterion(out, y)",
        "loss = criterion(scaler.fit_transform(out), y)",
        "import scipy.stats as s; loss = criterion(s.zscore(out), y)",
        "for a, b in zip(out, out[1:]): loss = loss + (a - b).abs().sum()",
        "soft = nn.Softmax(dim=0); loss = criterion(soft(out), y)",
        "loss = loss + f(model(held))",
        "loss = loss + (y[None] == y[:, None]).float().mean()",
        "p = out.softmax(1).mean(0); loss = loss + (p * p.log()).sum()",
        "x, y = x[:600], y[:600]; loss = criterion(model(x), y)",
        "x = x[:int(y.sum())]; loss = criterion(model(x), y)",
        "c = rows.mean(0); loss = criterion(out, y) + ((out - c) ** 2).mean()",
        "torch.sub(out, out.mean(0), out=out); loss = criterion(out, y)",
        "n = len(x) // 2; x, y = x[:n], y[:n]; loss = criterion(model(x), y)",
        "p.grad_sample /= p.grad_sample.norm()",
        "p.grad_sample.mul_(p.grad_sample.norm())",
    ],
)
def test_a_loss_in_which_records_meet_is_not_certified(loss: str) -> None:
    data = (
        "rows = some()\ndata = TensorDataset(rows)\nCE = nn.CrossEntropyLoss(reduction='none')\n"
        "held, rest = next(iter(DataLoader(data)))\n"
        "def spread(z):\n    return (z @ z.T).mean()\n"
        "class Own:\n    def forward(self, z, y):\n        l = f(z)\n        return l / l.item()\n"
        "own = Own()\n"
    )
    assert is_stopped(text_of(data=data, loss=loss))


def test_the_loss_of_a_backward_within_another_call_is_read() -> None:
    text = text_of(loss="loss = out.var(0).mean()")
    assert is_stopped(text.replace("loss.backward()", "seen.append(loss.backward())"))


@pytest.mark.parametrize(
    "row", ["x = (x - x.mean(0)) / x.std(0)", "x = x - x.mean()", "x = x / x.std((0, 2, 3))"]
)
def test_a_lot_that_is_normalised_as_a_whole_is_not_certified(row: str) -> None:
    assert is_stopped(text_of(row=row))


@pytest.mark.parametrize(("train", "code"), [("True", "data_dependent_stop"), ("False", None)])
def test_a_data_set_that_is_made_again_is_of_the_same_records(train: str, code: str | None) -> None:
    data = "from torchvision.datasets import MNIST\ndata = MNIST('.', train=True, transform=t)\n"
    data += f"val = DataLoader(MNIST('.', train={train}))"
    assert is_right(
        text_of(data=data, after="if f(val, model) > 9: break"), faulty=code is not None
    )


@pytest.mark.parametrize(
    ("weight", "code"),
    [
        ("torch.ones(len(np.bincount(rows)))", None),
        ("1 / np.bincount(others)", None),
    ],
)
def test_losses_are_not_weighed_by_all_records(weight: str, code: str | None) -> None:
    data = f"rows = some()\ndata = TensorDataset(rows)\nweight = {weight}"
    assert is_right(text_of(data=data, loss="loss = f(out, y, weight)"), faulty=code is not None)


@pytest.mark.parametrize(
    ("row", "loss"),
    [
        ("x = x.repeat(1, 3, 1, 1)", "loss = loss / len(x)"),
        ("x = torch.stack([x, x + 1], 1).flatten(1)", "pass"),
        ("x = x.expand(-1, 3, -1, -1).reshape(len(x), -1)", "pass"),
        ("x = x.expand(-1, 3, -1, -1); x = x.reshape(-1, 9).reshape(())", "pass"),
        ("import einops; x = einops.repeat(x, 'b d -> b (r d)', r=3)", "pass"),
        ("x = torch.cat([x, one_hot(y)], dim=1)", "loss = loss + sum(p.norm() for p in weights)"),
        ("keep = y < 5; x, y = x[keep], y[keep]", "loss = (out.sum(1) - out[rows, y]).mean()"),
        ("x = x / x.norm(dim=1, keepdim=True)", "loss = ((out - y) ** 2).sum(dim=1).mean()"),
        ("t = torch.randint(0, 9, (x.size(0),)); x = a[t] * x", "print((y * y).sum() / y.sum())"),
        ("x = x.flip(-1)", "z = model(x.flip(1)); loss = f(torch.cat([out, z]), cat([y, y]))"),
        ("x[y] = x[y] * 2", "ema = EMA(m); ema.step(model.parameters())"),
        ("self.log(x)", "loss = loss + self.head.norm()"),
        ("x = x[:, :lengths.max()]", "loss = (f(out, y, reduction='none') * weights[y]).mean()"),
        ("import einops; x = einops.rearrange(x, 'b c h -> b (c h)')", "loss = out.flatten(0, 1)"),
        ("x = torch.softmax(x, -1)", "loss = criterion(out, y) + 0.1 * out.pow(2).mean()"),
        ("x = x.unsqueeze(1)", "loss = torch.einsum('bi,ij,bj->b', out, w, out).mean()"),
        ("b = x.size(0)", "a, v = out.chunk(2, dim=1); loss = -0.5 * (1 + v - v.exp()).sum() / b"),
        ("x = x[:, :512]", "ce = CE(out, y); loss = ((1 - (-ce).exp()) ** 2 * ce).mean()"),
        ("m = y >= 0", "loss = criterion(out[m], y[m]) if y is not None else out.loss"),
        ("x = x.transpose(0, 1)", "loss = (out.topk(2, dim=1).values[:, 0]).mean() / 2"),
        ("pass", "for i, o in enumerate(out): loss = loss + w[i] * criterion(o, y)"),
        ("n = len(x) // 2", "loss = criterion(out[:n], y[:n]) + criterion(out[n:], y[n:])"),
        ("u, v = y.chunk(2)", "a, b = out.chunk(2); loss = criterion(a, u) + criterion(b, v)"),
        ("p.grad_sample = p.grad_sample * 2", "n = p.grad_sample.norm()"),
        ("p.grad_sample = torch.stack([g / g.norm() for g in p.grad_sample])", "pass"),
        ("x = (x - x.mean(dim=(1, 2), keepdim=True))", "loss = sum([loss, out.abs().mean()])"),
    ],
)  # fmt: skip
def test_a_lot_whose_records_stay_apart_is(row: str, loss: str) -> None:
    assert is_right(text_of(row=row, loss=loss), faulty=False)


@pytest.mark.parametrize(
    ("loss", "after"),
    [
        ("pass", "other.step()"),
        ("optimizer = SGD(optimizer.param_groups)", "pass"),
        ("extra = f(teacher(x), y); extra.backward(); other.step(); optimizer.zero_grad()", "pass"),
        ("g = torch.autograd.grad(loss, list(model.parameters()))", "pass"),
        ("pass", "model.centre.data = out.mean(0)"),
    ],
)
def test_what_learns_from_a_lot_beside_the_private_step_is_not_certified(
    loss: str, after: str
) -> None:
    assert is_stopped(text_of(loss=loss, after=after))


@pytest.mark.parametrize(
    "backward", ["accelerator.backward(loss)", "scaler.scale(loss).backward()"]
)
def test_a_loss_is_what_is_differentiated_by_whatever_name(backward: str) -> None:
    text = HEAD + "accelerator = Accelerator()\n" + PRIVATE + LOOP
    for loss, faulty in (("pass", False), ("loss = loss + out.var(0).mean()", True)):
        script = text.format(row="pass", loss=loss, after="pass").replace(
            "loss.backward()", backward
        )
        assert is_right(script, faulty=faulty)


STEP = """\
def train(model, batch, optimizer):
    x, y = batch
    {row}
    loss = f(model(x), y)
    loss.backward()
    optimizer.step()
    {after}
"""


@pytest.mark.parametrize(
    ("row", "after", "codes"),
    [
        ("pass", "pass", set()),
        ("x = x + x[torch.randperm(len(x))]", "pass", {"mixed_records"}),
        ("x = x / x.std(0)", "pass", {"joined_records"}),
        ("pass", "other.step()", {"other_optimizer"}),
        ("if x.mean() > 1: return", "pass", {"skipped_lots"}),
        ("if optimizer is None: return", "pass", set()),
        ("loader = again()\nfor e in y:\n    for x in loader:\n        train(m, x, optimizer)",
         None, {"other_loader"}),
    ],
)  # fmt: skip
def test_a_lot_is_followed_into_the_function_that_steps(
    row: str, after: str | None, codes: set[str]
) -> None:
    loop = "for e in range(3):\n    for x in loader:\n        train(model, x, optimizer)\n"
    step = STEP.format(row="pass" if after is None else row, after=after or "pass")
    last = row + "\n" if after is None else loop
    assert is_right(HEAD + step + PRIVATE + last, faulty=bool(codes))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("x = x / x.std(0)", "joined_records"),
        ("x = x @ x.T", "joined_records"),
        ("x = F.batch_norm(x, None, None, training=True)", "joined_records"),
        ("x = x / x.norm(dim=1, keepdim=True)", None),
        ("x = x @ self.weight.T", None),
        ("x = self.centre(x)", "joined_records"),
        ("x = Net.centre(self, x)", "joined_records"),
        ("x = self.fixed(x)", "joined_records"),
        ("self.part = Part(9, 9); x = self.part(x, k=x)", "joined_records"),
        ("self.plain = Plain(); x = self.plain(x)", "joined_records"),
        ("x = x + self.shift; x = x - x.mean(0)", "joined_records"),
        ("n = 9; x = x.view(n, -1).softmax(1).view(len(x), 9)", "joined_records"),
        ("b, n = x.shape; x = x.view(b, n).transpose(1, -1) + self.shift.expand(b, n)", None),
        ("x = self.head(x)", None),
    ],
)
def test_a_model_of_the_file_may_not_join_records(line: str, code: str | None) -> None:
    model = f"class Net(nn.Module):\n    def forward(self, x):\n        {line}\n        return x\n"
    model += "    def centre(self, z):\n        return z - z.mean(0)\n"
    model += "    @staticmethod\n    def fixed(z):\n        return z - z.mean(0)\n"
    model += (
        "class Part(nn.Linear):\n    def forward(self, z, k=0):\n        return z - k.mean(0)\n"
    )
    model += "class Plain:\n    def __call__(self, z):\n        return z - z.mean(0)\n"
    optimiser = "o = SGD(m.parameters(), lr=0.1)\n"
    for made, faulty in (("m = Net()\n" + optimiser, code is not None), ("spare = Net()\n", False)):
        assert is_right(text_of(data=model + made), faulty=faulty)


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("data", "after", "code"),
    [
        ("", "if f(model(rows)) > 9: break", "data_dependent_stop"),
        ("def look():\n    return f(rows)", "if look() > 9: break", "data_dependent_stop"),
        ("train = DataLoader(data)", "if f(train, model) > 9: break", "data_dependent_stop"),
        ("val = DataLoader(Subset(all, i))", "if f(val, model) > 9: break", None),
        ("val = DataLoader(Subset(data, i))", "if f(val, model) > 9: break", "data_dependent_stop"),
        ("val = rows[:9]", "if f(val, model) > 9: break", "data_dependent_stop"),
        ("val = rows[:9]; rows = rows[9:]", "if f(val, model) > 9: break", None),
        ("", "if f(rows, model) > 9: kept = model.state_dict()", "data_dependent_stop"),
        ("", "torch.manual_seed(0)", "repeated_noise"),
        ("def again():\n    torch.manual_seed(3)", "again()", "repeated_noise"),
        ("", "torch.set_rng_state(saved)", "repeated_noise"),
        ("torch.manual_seed(0)", "pass", None),
        ("", "torch.manual_seed(e)", None),
        ("", "model.centre = out.mean(0)", "other_optimizer"),
        ("", "best = max(models, key=lambda m: f(m, rows))", "data_dependent_stop"),
        ("", "f1 = [f(m, rows) for m in models]; best = np.argmin(f1)", "data_dependent_stop"),
        ("", "best = max(models, key=lambda m: f(m, others))", None),
        ("", "top = max(len(r) for r in rows)", None),
        ("", "g = p.grad; p.data.add_(g)", "other_optimizer"),
        ("", "torch._foreach_add_(ps, [p.grad for p in ps])", "other_optimizer"),
        ("", "p.data = p.data - p.grad", "other_optimizer"),
        ("stop = Stop()", "stop(loss.item())\n        if stop.now: break", "data_dependent_stop"),
        (
            "",
            "if loss < 9:\n            for g in o.param_groups: g['lr'] *= 0.1",
            "data_dependent_stop",
        ),
        ("rows = rows / 9", "if f(model(rows)) > 9: break", "data_dependent_stop"),
        ("rows = some_other()", "if f(model(rows)) > 9: break", None),
        ("", "optimizer.max_grad_norm = out.norm().item()", "data_dependent_stop"),
        ("", "optimizer.max_grad_norm = 1 / (e + 1)", None),
        ("", "for g in o.param_groups: g['lr'] = out.norm().item()", "data_dependent_stop"),
        ("", "for g in o.param_groups: g['lr'] = 1 / (e + 1)", None),
        ("def look():\n    return len(rows)", "if e * look() > 9: break", None),
        ("model.weight.data = rows.T @ rows", "pass", "other_optimizer"),
        ("model.weight.data = torch.load(w)", "pass", None),
        ("", "model.bias += out.mean(0)", "other_optimizer"),
        ("", "model.register_buffer('mean', out.mean(0))", "other_optimizer"),
        ("for v in DataLoader(data):\n    model.bias += v.mean()", "pass", "other_optimizer"),
        ("", "pass\nmodel.centre = out.mean(0)", "other_optimizer"),
        ("", "seen.append(f(rows, model)); save(models[np.argmax(seen)])", "data_dependent_stop"),
        ("", "d['a'] = f(rows, model); save(models[d['a']], d['b'])", "data_dependent_stop"),
        ("", "d['a'] = f(rows, model); save(models[d['b']])", None),
        ("", "runs[f(rows, model)] = 1; save(runs[max(runs)])", "data_dependent_stop"),
        ("", "if loss > 9: model.load_state_dict(last)", "data_dependent_stop"),
        (
            "",
            "told['a'].append(loss.item())\n        if told['a'][-1] < 9: break",
            "data_dependent_stop",
        ),
        ("", "told['b'].append(9)\n        if told['b'][-1] < 9: break", None),
        ("", "for v, g in zip(model.weights, grads(out)): v.assign_sub(g)", "other_optimizer"),
        ("", "for v, w in zip(model.weights, past.weights): v.assign_sub(w)", None),
        ("", "pass\nupdate_bn(rows, model)", "other_optimizer"),
        ("", "pass\nupdate_bn(others, model)", None),
        ("", "if loss > 9: sys.exit()", "data_dependent_stop"),
        (
            "",
            "pass\ntorch.save({'m': model.state_dict(), 'mean': rows.mean(0)})",
            "other_optimizer",
        ),
        ("", "torch.save({'m': model.state_dict(), 'mean': others.mean(0)})", None),
        ("", "torch.save({'m': model.state_dict(), 'rows': rows})", "other_optimizer"),
        (
            "def slow(o, l):\n    if l < 9:\n        o.param_groups[0]['lr'] = 1",
            "slow(o, out.norm())",
            "data_dependent_stop",
        ),
        ("", "getattr(optimizer, 'original_optimizer').step()", "other_optimizer"),
    ],
)
def test_all_records_decide_nothing_beside_the_step(
    data: str, after: str, code: str | None
) -> None:
    rows = "rows = some()\ndata = TensorDataset(rows)\n"
    assert is_right(text_of(data=rows + data, after=after), faulty=code is not None)


@pytest.mark.parametrize(
    ("loss", "scaled"),
    [
        ("loss = F.mse_loss(out, y, reduction='sum')", True),
        ("loss = F.mse_loss(out, y, reduction='none').sum()", True),
        ("loss = F.mse_loss(out, y, reduction='mean')", False),
        ("pass", False),
    ],
)
def test_a_loss_that_is_reduced_otherwise_does_not_provide_add_remove(
    loss: str, scaled: bool
) -> None:
    faults = [item.code for item in read(loss=loss).broken if item.applies("add_remove", ())]
    assert faults == ["private_divisor"] * (2 if scaled else 1)
    assert not any(item.applies("zero_out", ()) for item in read(loss=loss).broken)


def test_a_trainer_that_draws_its_own_lots_is_not_certified() -> None:
    text = (
        "args = TrainingArguments(gradient_accumulation_steps={})\n"
        "Trainer(model, args, train_dataset=data, optimizers=(optimizer, None)).train()\n"
    )
    for count in (1, 4):
        assert is_stopped(HEAD + PRIVATE + text.format(count))
    held = "t = Trainer(args)\nt.model, t.optimizer, t.train_dataloader = engine.make_private("
    private = PRIVATE.replace("model, optimizer, loader = engine.make_private(", held)
    assert is_stopped(HEAD + private + "t.train()\n")


def test_a_model_is_not_tuned_further_by_what_it_is_passed_to() -> None:
    text = (
        "def tune(net, lots):\n    again = SGD(net.parameters())\n    for x, y in lots:\n"
        "        f(net(x), y).backward()\n        again.step()\n"
    )
    loop = LOOP.format(row="pass", loss="pass", after="pass")
    assert is_stopped(HEAD + text + PRIVATE + loop + "tune(model, others)\n")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ("x = torch.cat([x, x.flip(1)])", "mixed_records"),
        ("x = x - x.mean(0)", "joined_records"),
        ("x = pad_sequence(rows, batch_first=True)", None),
    ],
)
def test_a_lot_is_collated_of_rows_that_stay_apart(row: str, code: str | None) -> None:
    collate = (
        f"def put(rows):\n    x = torch.stack([r for r in rows])\n    {row}\n    return x, 0\n"
    )
    private = PRIVATE.replace("batch_size=6", "batch_size=6, collate_fn=put")
    loop = LOOP.format(row="pass", loss="pass", after="pass")
    assert is_right(HEAD + collate + private + loop, faulty=code is not None)


@pytest.mark.parametrize(
    ("part", "code"), [("- torch.stack(rows).mean(0)", "joined_records"), ("/ 255", None)]
)
def test_a_lambda_collates_rows_that_stay_apart(part: str, code: str | None) -> None:
    joins = f"batch_size=6, collate_fn=lambda rows: torch.stack([r for r in rows]) {part}"
    loop = LOOP.format(row="pass", loss="pass", after="pass")
    private = PRIVATE.replace("batch_size=6", joins)
    assert is_right(HEAD + private + loop, faulty=code is not None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("engine =", "data.data = data.data[:9]\nengine ="),
        ("engine =", "loader.batch_sampler.batch_size = 9\nengine ="),
    ],
)
def test_what_a_loader_holds_is_unknown_once_it_is_set_again(old: str, new: str) -> None:
    text = (
        HEAD
        + "from torchvision.datasets import MNIST\ndata = MNIST(d, train=True)\n"
        + PRIVATE
        + LOOP.format(row="0", loss="0", after="0")
    )
    sizes = []
    for script in (text, text.replace(old, new, 1)):
        partial = importer.read(script.encode())
        assert partial is not None
        sizes.append([partial.data.get("dataset"), partial.data["sampling"].get("lot_size")])
    assert None not in sizes[0]
    assert None in sizes[1]


def test_a_generator_learns_from_no_lot_and_its_steps_do_not_count() -> None:
    after = "fake = f(model(g(torch.randn(x.size(0), 9)))); fake.backward(); other.step()"
    partial = read(after=after)
    assert {item.code for item in partial.broken} == {"private_divisor"}
    assert partial.data["epochs"] == 3


def test_another_optimiser_on_the_lots_is_asked_about() -> None:
    text = HEAD + PRIVATE + LOOP.format(row="pass", loss="pass", after="pass")
    text += "for x, y in loader:\n    f({}(x) / t, y).backward()\n    other.step()\n"
    assert is_stopped(text.format("body"))
    assert is_stopped(text.format("model"))


def test_a_copy_of_the_private_model_is_not_tuned_unasked() -> None:
    text = "data = Rows()\n" + LOOP.format(row="pass", loss="pass", after="pass")
    text = HEAD + PRIVATE + text + "copy = Net()\ncopy.load_state_dict(model.state_dict())\n"
    text += "tuner = SGD(copy.parameters())\nfor x, y in DataLoader({}):\n"
    text += "    f(copy(x), y).backward()\n    tuner.step()\n"
    assert is_stopped(text.format("data"))
    assert is_stopped(text.format("public"))


@pytest.mark.parametrize(
    ("line", "codes"), [("self.other.step()", {"other_optimizer"}), ("pass", set())]
)
def test_a_trainer_may_have_a_method_that_steps(line: str, codes: set[str]) -> None:
    trainer = (
        "class Trainer:\n    def __init__(self):\n        self.other = SGD(m.parameters())\n"
        "    def step(self, x, y):\n        f(model(x), y).backward()\n        optimizer.step()\n"
        f"        {line}\n    def run(self):\n        for x, y in loader:\n"
        "            self.step(x, y)\nTrainer().run()\n"
    )
    assert is_right(HEAD + "data = Rows(X)\n" + PRIVATE + trainer, faulty=bool(codes))


def test_each_step_on_a_lot_is_of_what_an_engine_is_attached_to() -> None:
    text = (
        "from fastDP import PrivacyEngine\n"
        "engine = PrivacyEngine(m, batch_size=6, sample_size=60, noise_multiplier=1.0)\n"
        "engine.attach(optimizer)\nother = SGD(body.parameters())\n"
    ) + LOOP
    for after in ("pass", "other.step()"):
        script = text.format(row="pass", loss="pass", after=after)
        assert is_right(script, faulty=after != "pass")


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("for lot in plan.lots.batch_iterator(60):\n    step(lot)\n", 9),
        (
            "for e in range(5):\n    for lot in plan.lots.batch_iterator(60):\n        step(lot)\n",
            45,
        ),
        (
            "for e in epochs:\n    for lot in plan.lots.batch_iterator(60):\n        step(lot)\n",
            None,
        ),
        ("", 9),
    ],
)
def test_a_plan_whose_lots_are_drawn_again_has_more_steps(loop: str, steps: int | None) -> None:
    text = (
        "import jax_privacy\nplan = jax_privacy.BandMFExecutionPlanConfig(iterations=9, "
        "num_bands=1, noise_multiplier=1.0, sampling_prob=0.1).make()\n"
    )
    partial = importer.read((text + loop).encode())
    assert partial is not None
    assert partial.data.get("steps") == steps


@pytest.mark.parametrize(
    "data",
    [
        "X = scaler.fit_transform(X)\ndata = Rows(X)",
        "X = [X[i:i + 9] for i in range(99)]\ndata = Rows(X)",
        "data = Rows([part for text in X for part in cut(text)])",
        "def group(rows):\n    return chain(*rows)\ndata = Rows(X.map(group, batched=True))",
        "data = Rows(X.rolling(3))",
        f"{FRAME}data = Rows(df.drop('b', axis=1).values)",
        f"{FRAME}data = Rows(torch.tensor(df[['a', 'c']].to_numpy()).float())",
        "df = pd.read_csv('a.csv')\ndf = df.fillna(df.mean())\ndata = Rows(df.values.astype('f'))",
        "df = pd.read_csv('a.csv').ffill()\ndata = Rows(df.values)",
        "df = pd.read_csv('a.csv').fillna(method='ffill')\ndata = Rows(df.values)",
    ],
)
def test_records_that_are_computed_together_or_cut_are_asked_about(data: str) -> None:
    assert is_stopped(text_of(data=data))


@pytest.mark.parametrize(
    ("data", "noted"),
    [("m = M.from_pretrained('last')", True), ("data = torch.load('data.pt')", False)],
)
def test_weights_that_are_loaded_are_assumed_to_be_public(data: str, noted: bool) -> None:
    assert any("are public" in text for text in read(data=data).assumed) is noted


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("def anneal(optimizer):\n    optimizer.noise_multiplier *= 0.9\n", True),
        ("import opacus\nopacus.PrivacyEngine.make_private = other\n", True),
        ("import torch\ntorch.normal = quiet\n", True),
        ("import torch\nif not hasattr(torch, 'Part'):\n    torch.normal = quiet\n", True),
        ("import torch\nif hasattr(torch, 'Part'):\n    torch.Part = quiet\n", True),
        ("import torch\nif not hasattr(torch, 'Part'):\n    torch.Part = quiet\n", False),
        (
            "import torch\nif not hasattr(torch, 'normal'):\n    pass\n"
            "else:\n    torch.normal = quiet\n",
            True,
        ),
        (
            "import torch\ndelattr(torch, 'normal')\n"
            "if not hasattr(torch, 'normal'):\n    torch.normal = quiet\n",
            True,
        ),
        ("import deeper\n", True),
        ("def anneal(optimizer):\n    optimizer.lr = 0.1\n", False),
        ("class A:\n    def f(self):\n        self.noise_multiplier = 1\n", False),
    ],
)
def test_a_module_of_the_repository_may_not_change_the_noise(
    text: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(text)
    (tmp_path / "deeper.py").write_text("optimizer.add_noise = quiet\n")
    script = "import tools\n" + HEAD + PRIVATE + LOOP.format(row="pass", loss="pass", after="pass")
    if refused:
        with pytest.raises(MalformedPlan, match=r"of (tools|deeper)\.py"):
            importer.read(script.encode(), tmp_path)
    else:
        assert importer.read(script.encode(), tmp_path) is not None


def test_a_loss_of_the_repository_may_not_join_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text("def spread(z):\n    return (z @ z.T).mean()\n")
    loop = LOOP.format(row="pass", loss="loss = loss + tools.spread(out)", after="pass")
    partial = importer.read(("import tools\n" + HEAD + PRIVATE + loop).encode(), tmp_path)
    assert partial is not None
    assert partial.open_uses


def test_expressions_that_are_nested_too_deeply_are_refused() -> None:
    with pytest.raises(MalformedPlan, match="nested too deeply"):
        read(row="x[y] = x[z] + " + "1 + " * 700 + "1")


def test_a_function_that_steps_and_calls_itself_is_followed_to_an_end() -> None:
    update = (
        "def update(x, y):\n    loss = criterion(model(x), y)\n    loss.backward()\n"
        "    optimizer.step()\n    update(x, y)\n"
    )
    loop = "for x, y in loader:\n    update(x, y)\n"
    assert importer.read((HEAD + "data = Rows(X)\n" + PRIVATE + update + loop).encode()) is not None


TABLE = """\
import numpy as np
import pandas as pd
import torch
from opacus import PrivacyEngine
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset
df = pd.read_csv("adult.csv")
y = df["income"].values
X = df.drop(columns=["income"])
{line}
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2)
train = TensorDataset(torch.tensor(X_train), torch.tensor(y_train))
loader = DataLoader(train, batch_size=256, shuffle=True)
model = torch.nn.Linear(9, 1)
criterion = torch.nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# affidavit: adjacency=zero_out dataset_size=36177 target_delta=1e-5
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
for epoch in range(5):
    for x, t in loader:
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "line",
    [
        "X = (X - X.mean()) / X.std()",
        "X = X / X.max()",
        "X = pd.get_dummies(X)",
        "top = X.max()\nX = X / top",
        "def scaled(z):\n    return z / z.std()\nX = scaled(X)",
        "for i in range(2):\n    X = X / X.max()",
        "if len(df) > 3:\n    X = X / X.sum()",
    ],
)
def test_an_answer_where_records_are_split_does_not_cover_how_they_were_made(line: str) -> None:
    text = TABLE.format(line=line)
    answered = text.replace("test_size=0.2)", "test_size=0.2)  # affidavit: harmless=splits")
    assert is_stopped(text)
    assert is_stopped(answered)
    asked = importer.read(text.encode())
    assert asked is not None
    lines = text.splitlines()
    for use in asked.open_uses:
        lines[use.line - 1] += "  # affidavit: harmless=of_public_records"
    assert not is_stopped("\n".join(lines))


def test_an_answer_about_values_does_not_cover_what_is_computed_of_them() -> None:
    text = TABLE.format(line='y = df["income"].str.len()\ny = y / y.max()')
    assert is_stopped(text.replace(".str.len()", ".str.len()  # affidavit: harmless=by_row"))


@pytest.mark.parametrize(
    "line",
    [
        "X = X[:, X.std(0) > 0]",
        "X = X[X > X.mean()]",
        "X = X[y]",
        "X = X[(y == 1) * 1]",
        "X = X.clip(0, X.max())",
        "X = X.fillna(X.mean())",
        'X = X.fillna(method="ffill")',
        'X = X.replace("?", method="ffill")',
        "X = np.where(X > 0, X, X[::-1])",
        "X = X.transform(lambda column: column / column.max())",
        'X = df.groupby("age").transform("mean")',
        "rule = PCA().fit(X)\nX = rule.transform(X)",
        "def later(X):\n    X.fit(1)\nX = X.transform('rank')",
        "X = X.T",
        "X = X.values.transpose()",
        "X = X.dropna(axis=1)",
        'X = X.replace("?")',
        "X = X[: int(y.max())]",
        "X = torch.softmax(torch.tensor(X.values), 0)",
        "X, y = X.values[1:], y[:-1]",
        "y = y[::-1]",
        "X = X[y[::-1] > 0]",
        "X = np.where(X.values > X.values[::-1], 1, 0)",
        'X = pd.DataFrame({"a": X["a"].values, "b": X["b"].values[::-1]})',
        'X["a"] = X["a"] / X["a"].max()',
        "if X.mean() > 3:\n    X = X + 1",
        "class Loaders:\n    def test(self, X):\n"
        "        return train_test_split(X / X.max(), y)[0]\n"
        "X = Loaders().test(X)",
        "class Loaders:\n    def __init__(self, test):\n        self.rows = test\n"
        "X = Loaders(train_test_split(X / X.max(), y)[0]).rows",
    ],
)
def test_records_that_are_computed_together_are_asked_about(line: str) -> None:
    assert is_stopped(TABLE.format(line=f"from sklearn.decomposition import PCA\n{line}"))


HELD = "torch.tensor((X / X.max()).to_numpy()), torch.tensor(y)"


@pytest.mark.parametrize(
    "data",
    [
        f"data = TensorDataset({HELD})",
        f"sets = {{'train': TensorDataset({HELD})}}\ndata = sets['train']",
        f"sets = dict()\nsets['train'] = TensorDataset({HELD})\ndata = sets['train']",
        f"made = lambda: TensorDataset({HELD})\ndata = made()",
        "class Own(TensorDataset):\n    def __init__(self, part):\n"
        f"        super().__init__({HELD})\ndata = Own('train')",
    ],
)
def test_records_are_found_wherever_they_are_held(data: str) -> None:
    frame = (
        "import pandas as pd\ndf = pd.read_csv('a.csv')\nX, y = df.drop(columns=['y']), df['y']\n"
    )
    assert is_stopped(text_of(data=frame + data))


@pytest.mark.parametrize(("rows", "stopped"), [("X, y", False), ("X[1:], y[:-1]", True)])
def test_keras_is_given_rows_and_labels_of_the_same_records(rows: str, *, stopped: bool) -> None:
    text = f"""\
import numpy as np
import tensorflow as tf
from tensorflow_privacy import DPKerasSGDOptimizer
X, y = np.load("X.npy"), np.load("y.npy")
model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
optimizer = DPKerasSGDOptimizer(
    l2_norm_clip=1.0, noise_multiplier=1.0, num_microbatches=64, learning_rate=0.1)
loss = tf.keras.losses.SparseCategoricalCrossentropy(reduction=tf.losses.Reduction.NONE)
model.compile(optimizer=optimizer, loss=loss)
model.fit({rows}, epochs=3, batch_size=64)
# affidavit: adjacency=zero_out dataset_size=6400 target_delta=1e-5
"""
    assert is_stopped(text) is stopped


@pytest.mark.parametrize(
    ("line", "stopped"),
    [
        ("rate = len(X[y == 1])", True),
        ("some = X[y == 1]\nrate = some.shape[0] / len(X)", True),
        ("rate = len(X.dropna())", True),
        ("rate = len(pd.get_dummies(X).columns)", True),
        ("rate = 1 / len(X)", False),
        ("X = X[X['age'] > 9]\nrate = 1 / len(X)", False),
    ],
)
def test_how_many_records_are_chosen_is_a_value_of_them(line: str, *, stopped: bool) -> None:
    text = TABLE.format(line=line).replace("lr=0.1", "lr=rate")
    assert "lr=rate" in text
    assert is_stopped(text) is stopped


@pytest.mark.parametrize(
    "line",
    [
        'X = X[y == ">50K"]',
        'X = X[~(X["age"] > 9) & X["sex"].notna()]',
        'X = X[X.notna().all(axis=1)].replace("?", 0).fillna(0)',
        'y = df["income"].str.strip().str.lower().isin(["a", "b"])',
        "X = np.log1p(np.clip(X, 0, 9))",
        "X = X.dropna(axis=0).replace({0: 1})",
        "X = X.values[:9][y[:9] > 0].transpose(0, 2, 1)",
        "print(X.mean(), X.describe())",
        "tested = TensorDataset(torch.tensor(X / X.max()))  # for the test",
    ],
)
def test_a_table_whose_entries_are_computed_by_themselves_is_not(line: str) -> None:
    partial = importer.read(TABLE.format(line=line).encode())
    assert partial is not None
    assert not partial.open_uses


def test_each_line_that_computes_records_together_is_one_question() -> None:
    line = "top = X.max()\nX = pd.get_dummies(X)\nX = X.astype(int)\nX = X / top\nprint(X.shape)"
    partial = importer.read(TABLE.format(line=line).encode())
    assert partial is not None
    assert [use.line for use in partial.open_uses] == [10, 11, 13]


TOKENS = """\
from datasets import load_dataset
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
def cut(rows):
    return {cut}
data = load_dataset("imdb", split="train")
data = data.map(cut, batched=True)
"""


@pytest.mark.parametrize(
    ("cut", "asked"),
    [
        ('tokenizer(rows["text"], padding="max_length", truncation=True)', False),
        ('tokenizer(rows["text"], padding=True)', True),
        ('tokenizer(rows["text"] * 2, padding="max_length")', True),
        ('tokenizer([" ".join(rows["text"])], padding="max_length")', True),
        ('tokenizer(rows["text"], **{"return_overflowing_tokens": True})', True),
        ('tokenizer(rows["text"], padding="max_length", return_overflowing_tokens=True)', True),
        ('{"text": [part for text in rows["text"] for part in text.split()]}', True),
    ],
)
def test_a_batch_of_texts_becomes_one_row_for_each(cut: str, *, asked: bool) -> None:
    questions = read(data=TOKENS.format(cut=cut)).open_uses
    assert bool([use for use in questions if "cut" in use.message]) is asked


SEEDED = """\
import argparse
import config
import torch
from monai.utils import set_determinism
from opacus import PrivacyEngine
from torchvision import datasets
from utils import fix_seed
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int{default})
args = parser.parse_args()
{seed}
train = datasets.MNIST("data", train=True)
loader = torch.utils.data.DataLoader(train, batch_size=64)
model = torch.nn.Linear(784, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
# affidavit: adjacency=zero_out target_delta=1e-5
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
for epoch in range(3):
    for x, t in loader:
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("seed", "default", "is_secret"),
    [
        ("torch.manual_seed(args.seed)", "", True),
        ("torch.manual_seed(args.seed)", ", default=None", True),
        ("torch.manual_seed(args.seed)", ", default=config.SEED", False),
        ("fix_seed(args.seed)", "", True),
        ("fix_seed(args.seed)", ", default=config.SEED", False),
        ("fix_seed(42)", "", False),
        ("set_determinism(seed=42)", "", False),
        ("fix_seed()", "", False),
        ("renamed = fix_seed\nrenamed(42)", "", False),
        ("from utils import fix_seed as fix\nfix(42)", "", False),
        ("from utils import setup\nsetup(seed=42)", "", False),
        ("from utils import setup\nsetup(args.seed)", "", True),
        ("from utils import setup\nsetup(42)", "", True),
        ("parser.set_defaults(seed=42)\ntorch.manual_seed(args.seed)", "", False),
        ("parser.set_defaults(**config.ALL)\ntorch.manual_seed(args.seed)", "", False),
        ("if args.seed is None:\n    args.seed = 42\ntorch.manual_seed(args.seed)", "", False),
        ("torch.manual_seed(getattr(args, 'other', 42))", "", False),
        ("torch.manual_seed(config.load().seed)", "", False),
        ("torch.use_deterministic_algorithms(True)", "", True),
    ],
)
def test_a_seed_that_the_repository_holds_is_asked_about(
    seed: str, default: str, is_secret: bool
) -> None:
    assert is_stopped(SEEDED.format(seed=seed, default=default)) is not is_secret


CARRIED = (
    SEEDED.replace("{seed}", "pass")
    .replace("{default}", "")
    .replace("for epoch in range(3):\n", "for epoch in range(3):\n    {before}\n")
    .replace(
        "        criterion(model(x), t).backward()\n", "        {lot}\n        {loss}.backward()\n"
    )
)


@pytest.mark.parametrize(
    ("before", "lot", "loss", "is_fresh"),
    [
        ("pass", "all = [criterion(model(x), t)]", "sum(all)", True),
        ("pass", "total = 0; total += criterion(model(x), t)", "total", True),
        ("all = []", "all.append(criterion(model(x), t))", "sum(all)", False),
        ("all = dict(a=[])", "all['a'].append(criterion(model(x), t))", "sum(all['a'])", False),
        ("total = torch.zeros(())", "total += criterion(model(x), t)", "total", False),
        ("total = 0", "total = total + criterion(model(x), t)", "total", False),
    ],
)
def test_losses_of_earlier_lots_are_no_part_of_a_step(
    before: str, lot: str, loss: str, is_fresh: bool
) -> None:
    text = CARRIED.format(before=before, lot=lot, loss=loss)
    assert is_stopped(text) is not is_fresh
