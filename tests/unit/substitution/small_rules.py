"""Rules of a few lines, and laws that are proved by cases with neighbours of theirs that are wrong."""

from __future__ import annotations

import json
from typing import Any

from mlc.substitution.codec import load_rule
from mlc.substitution.rule import Rule

__all__ = ["BY_CASES", "NEARLY", "SUM", "rule"]

SUM = "axes=[1] keepdims=1"


def rule(source: list[str], target: list[str], **inputs: Any) -> Rule:
    """A rule from lines such as ``div b a`` and ``sum %0 axes=[1] keepdims=1``; a target of one word is an input."""
    def side(lines: list[str]) -> dict[str, Any]:
        if len(lines[0].split()) == 1:
            return {"nodes": [], "outputs": [lines[0]]}
        nodes = []
        for line in lines:
            op, *words = line.split()
            given = dict(word.split("=") for word in words if "=" in word)
            nodes.append({"op": op, "inputs": [word for word in words if "=" not in word],
                          "attributes": {name: json.loads(value) for name, value in given.items()}})
        return {"nodes": nodes, "outputs": [f"%{len(nodes) - 1}"]}

    shapes = inputs or {name: ["m", "k"] for name in "ab"}
    read = {word for line in (*source, *target) for word in line.split()}
    return load_rule({"name": "division", "inputs": {n: s for n, s in shapes.items() if n in read}, "conditions": [],
                      "source": side(source), "target": side(target)})


#: by name; those of :data:`NEARLY` with the same name are wrong
BY_CASES: dict[str, Rule] = {
    "min(relu(a), relu(b)) = relu(min(a, b))": rule(["relu a", "relu b", "minimum %0 %1"], ["minimum a b", "relu %0"]),
    "relu(a) exp(relu(a)) = relu(a) exp(a)": rule(["relu a", "exp %0", "mul %0 %1"], ["relu a", "exp a", "mul %0 %1"]),
    "min(a, -relu(-a)) = min(a, 0)": rule(["neg a", "relu %0", "neg %1"], ["sub a a", "minimum a %0"]),
    "max(a, b) min(a, b) = ab": rule(["maximum a b", "minimum a b", "mul %0 %1"], ["mul a b"]),
    "a sum(a) / (a sum(a)) = a/a": rule([f"sum a {SUM}", "mul a %0", "div %1 %1"], ["div a a"]),
    "sum(softmax(-a)) = sum(softmax(a))": rule(["neg a", "softmax %0 axis=1", f"sum %1 {SUM}"],
                                               ["softmax a axis=1", f"sum %0 {SUM}"]),
    "softmax(a + a/a) = softmax(a)": rule(["div a a", "add a %0", "softmax %1 axis=1"], ["softmax a axis=1"]),
    "max(log(a)) = log(max(a))": rule(["log a", f"max %0 {SUM}"], [f"max a {SUM}", "log %0"]),
    "max(sqrt(a)) = sqrt(max(a))": rule(["sqrt a", f"max %0 {SUM}"], [f"max a {SUM}", "sqrt %0"]),
    "log(a)/relu(log(a)) = a/relu(a)": rule(["log a", "relu %0", "div %0 %1"], ["relu a", "div a %0"]),
    "erf(a)/relu(erf(a)) = a/relu(a)": rule(["erf a", "relu %0", "div %0 %1"], ["relu a", "div a %0"]),
    "min(a, log(relu(a))) = min(a, log(a))": rule(["relu a", "log %0", "minimum a %1"], ["log a", "minimum a %0"]),
    "max(a, a/a) = a / min(a/a, a) of a quotient": rule(["div a a", "minimum a %0", "div a %1"],
                                                        ["div a a", "maximum a %0"]),
    "1/[a, 2a] = [1/a, 1/2a]": rule(["add a a", "concat a %0 axis=0", "reciprocal %1"],
                                    ["add a a", "reciprocal a", "reciprocal %0", "concat %1 %2 axis=0"]),
    "max([a, max(a)]) = max(a)": rule([f"max a {SUM}", "concat a %0 axis=1", f"max %1 {SUM}"], [f"max a {SUM}"]),
    "max([a, [a, b]]) = max(max(a, b))": rule(["concat a b axis=1", "concat a %0 axis=1", f"max %1 {SUM}"],
                                              ["maximum a b", f"max %0 {SUM}"]),
    "max(1, sqrt(1)) = 1": rule(["div a a", "sqrt %0", "maximum %0 %1"], ["div a a"]),
    "min(erf(a), sqrt(erf(a))) = erf(a)": rule(["erf a", "sqrt %0", "minimum %0 %1"], ["erf a"]),
    "max(1, gelu(1)) = 1": rule(["div a a", "gelu %0", "maximum %0 %1"], ["div a a"]),
    "tanh(mean(a)) / tanh(mean(a)) = sum(a)/sum(a)": rule([f"mean a {SUM}", "tanh %0", "div %1 %1"],
                                                          [f"sum a {SUM}", "div %0 %0"]),
    "[a, erf(a)]/[a, erf(a)] = [a, a]/[a, a]": rule(
        ["erf a", "concat a %0 axis=0", "div %1 %1"], ["concat a a axis=0", "div %0 %0"]),
    "(relu(a) - a)/(relu(a) - a) = a/(a - relu(a))": rule(["relu a", "sub %0 a", "div %1 %1"],
                                                          ["relu a", "sub a %0", "div a %1"]),
    "max(a - tanh(a)) = max(a) - tanh(max(a))": rule(["tanh a", "sub a %0", f"max %1 {SUM}"],
                                                     [f"max a {SUM}", "tanh %0", "sub %0 %1"]),
    "sigmoid(min(a, sigmoid(a))) = min(sigmoid(a), sigmoid(sigmoid(a)))": rule(
        ["sigmoid a", "minimum a %0", "sigmoid %1"], ["sigmoid a", "sigmoid %0", "minimum %0 %1"]),
    "log(min(a, b)) = min(log(a), log(b))": rule(["minimum a b", "log %0"], ["log a", "log b", "minimum %0 %1"]),
    "min(a, relu(tanh(a))) = min(a, tanh(a))": rule(["tanh a", "relu %0", "minimum a %1"], ["tanh a", "minimum a %0"]),
    "max(min(a, c)) = min(max(a), c)": rule(["minimum a c", f"max %0 {SUM}"], [f"max a {SUM}", "minimum %0 c"],
                                            a=["m", "k"], c=["m", 1]),
    "sum(relu([a, a])) = sum(relu(a)) + sum(relu(a))": rule(
        ["concat a a axis=1", "relu %0", f"sum %1 {SUM}"], ["relu a", f"sum %0 {SUM}", "add %1 %1"]),
    "[0, gelu(a)] = gelu([0, a])": rule(["sub a a", "gelu a", "concat %0 %1 axis=0"],
                                        ["sub a a", "concat %0 a axis=0", "gelu %1"]),
    "softmax(a) sum(softmax(a)) = sum(softmax(a))": rule(
        ["softmax a axis=1", f"sum %0 {SUM}", "matmul %0 %1"], ["softmax a axis=1", f"sum %0 {SUM}"], a=["m", "m"]),
    "sum([b, softmax(a)]) = sum(b + softmax(b))": rule(
        ["softmax a axis=1", "concat b %0 axis=1", f"sum %1 {SUM}"],
        ["softmax b axis=1", "add b %0", f"sum %1 {SUM}"], a=["m", "k"], b=["m", "l"]),
    "softmax(1/sqrt(a/a)) = softmax(a - a)": rule(["div a a", "rsqrt %0", "softmax %1 axis=1"],
                                                  ["sub a a", "softmax %0 axis=1"]),
    "softmax(gelu(a/a)) = softmax(a - a)": rule(["div a a", "gelu %0", "softmax %1 axis=1"],
                                                ["sub a a", "softmax %0 axis=1"]),
    "log(min(a, log(a))) = min(log(a), log(log(a)))": rule(["log a", "minimum a %0", "log %1"],
                                                           ["log a", "log %0", "minimum %0 %1"]),
    "max(log(tanh(a))) = log(tanh(max(a)))": rule(["tanh a", "log %0", f"max %1 {SUM}"],
                                                  [f"max a {SUM}", "tanh %0", "log %1"]),
}
NEARLY: dict[str, Rule] = {
    "min(relu(a), relu(b)) = relu(min(a, b))": rule(["relu a", "relu b", "minimum %0 %1"], ["maximum a b", "relu %0"]),
    "relu(a) exp(relu(a)) = relu(a) exp(a)": rule(["relu a", "exp %0", "mul a %1"], ["relu a", "exp a", "mul %0 %1"]),
    "min(a, -relu(-a)) = min(a, 0)": rule(["neg a", "relu %0", "neg %1"], ["sub a a", "maximum a %0"]),
    "max(a, b) min(a, b) = ab": rule(["maximum a b", "maximum a b", "mul %0 %1"], ["mul a b"]),
    "a sum(a) / (a sum(a)) = a/a": rule([f"sum a {SUM}", "mul b %0", "div %1 %1"], ["div a a", "div b b", "mul %0 %1"]),
    "sum(softmax(-a)) = sum(softmax(a))": rule(["neg a", "softmax %0 axis=1", f"max %1 {SUM}"],
                                               ["softmax a axis=1", f"sum %0 {SUM}"]),
    "softmax(a + a/a) = softmax(a)": rule(["div a a", "mul a %0", "add a %1", "softmax %2 axis=1"],
                                          ["softmax a axis=1"]),
    "max(log(a)) = log(max(a))": rule([f"max a {SUM}", "log %0"], ["log a", f"max %0 {SUM}"]),
    "max(sqrt(a)) = sqrt(max(a))": rule([f"max a {SUM}", "sqrt %0"], ["sqrt a", f"max %0 {SUM}"]),
    "log(a)/relu(log(a)) = a/relu(a)": rule(["log a", "div %0 %0"], ["log a", "relu %0", "div %1 %1"]),
    "erf(a)/relu(erf(a)) = a/relu(a)": rule(["erf a", "div %0 %0"], ["relu a", "div a %0"]),
    "min(a, log(relu(a))) = min(a, log(a))": rule(["relu a", "exp %0", "minimum a %1"], ["log a", "minimum a %0"]),
    "max(a, a/a) = a / min(a/a, a) of a quotient": rule(["div a a", "minimum a %0", "div a %1"],
                                                        ["div a a", "minimum a %0"]),
    "1/[a, 2a] = [1/a, 1/2a]": rule(["add a a", "concat a %0 axis=0", "reciprocal %1"],
                                    ["add a a", "reciprocal a", "reciprocal %0", "concat %2 %1 axis=0"]),
    "max([a, max(a)]) = max(a)": rule([f"sum a {SUM}", "concat a %0 axis=1", f"max %1 {SUM}"], [f"max a {SUM}"]),
    "max([a, [a, b]]) = max(max(a, b))": rule(["concat a b axis=1", "concat a %0 axis=1", f"max %1 {SUM}"],
                                              ["minimum a b", f"max %0 {SUM}"]),
    "max(1, sqrt(1)) = 1": rule(["sqrt a", "div a a", "maximum %0 %1"], ["div a a"]),
    "min(erf(a), sqrt(erf(a))) = erf(a)": rule(["sqrt a", "minimum a %0"], ["add a a", "sub %0 a"]),
    "max(1, gelu(1)) = 1": rule(["gelu a", "div a a", "maximum %0 %1"], ["div a a"]),
    "tanh(mean(a)) / tanh(mean(a)) = sum(a)/sum(a)": rule([f"mean a {SUM}", "exp %0", "div %1 %1"],
                                                          [f"sum a {SUM}", "div %0 %0"]),
    "[a, erf(a)]/[a, erf(a)] = [a, a]/[a, a]": rule(
        ["exp a", "concat a %0 axis=0", "div %1 %1"], ["concat a a axis=0", "div %0 %0"]),
    "(relu(a) - a)/(relu(a) - a) = a/(a - relu(a))": rule(["relu a", "sub %0 a", "div %1 %1"],
                                                          ["relu a", "sub %0 a", "div a %1"]),
    "max(a - tanh(a)) = max(a) - tanh(max(a))": rule(["erf a", "sub a %0", f"max %1 {SUM}"],
                                                     [f"max a {SUM}", "erf %0", "sub %0 %1"]),
    "sigmoid(min(a, sigmoid(a))) = min(sigmoid(a), sigmoid(sigmoid(a)))": rule(
        ["sigmoid a", "minimum a %0", "sigmoid %1"], ["sigmoid a", "sigmoid %0", "maximum %0 %1"]),
    "log(min(a, b)) = min(log(a), log(b))": rule(["maximum a b", "log %0"], ["log a", "log b", "maximum %0 %1"]),
    "min(a, relu(tanh(a))) = min(a, tanh(a))": rule(["tanh a", "relu %0", "minimum a %1"], ["relu a", "minimum a %0"]),
    "max(min(a, c)) = min(max(a), c)": rule(["maximum a c", f"max %0 {SUM}"], [f"max a {SUM}", "minimum %0 c"],
                                            a=["m", "k"], c=["m", 1]),
    "sum(relu([a, a])) = sum(relu(a)) + sum(relu(a))": rule(
        ["concat a a axis=1", "relu %0", f"sum %1 {SUM}"], ["relu a", f"sum a {SUM}", "add %1 %1"]),
    "[0, gelu(a)] = gelu([0, a])": rule(["sub a a", "exp a", "concat %0 %1 axis=0"],
                                        ["sub a a", "concat %0 a axis=0", "exp %1"]),
    "softmax(a) sum(softmax(a)) = sum(softmax(a))": rule(
        ["softmax a axis=1", f"max %0 {SUM}", "matmul %0 %1"], ["softmax a axis=1", f"max %0 {SUM}"], a=["m", "m"]),
    "sum([b, softmax(a)]) = sum(b + softmax(b))": rule(
        ["softmax a axis=1", "concat b %0 axis=1", f"sum %1 {SUM}"], ["add b b", f"sum %0 {SUM}"],
        a=["m", "k"], b=["m", "l"]),
    "softmax(1/sqrt(a/a)) = softmax(a - a)": rule(["sub a a", "softmax %0 axis=1"],
                                                  ["div a a", "rsqrt %0", "softmax %1 axis=1"]),
    "softmax(gelu(a/a)) = softmax(a - a)": rule(["add a a", "gelu %0", "softmax %1 axis=1"],
                                                ["sub a a", "softmax %0 axis=1"]),
    "log(min(a, log(a))) = min(log(a), log(log(a)))": rule(["log a", "maximum a %0", "log %1"],
                                                           ["log a", "log %0", "maximum %0 %1"]),
    "max(log(tanh(a))) = log(tanh(max(a)))": rule([f"max a {SUM}", "tanh %0", "log %1"],
                                                  ["tanh a", "log %0", f"max %1 {SUM}"]),
}
