"""Wrong as text: TOML, keys, expressions, flows. ⟦ marks where the error must point."""

from __future__ import annotations

from .tiny import Wrong

LONG = " + ".join(["1"] * 600)
DEEP = "-" * 60 + "1"


def let(expression: str) -> str:
    return f"[let]\nhd = {expression}\n"


def flow(*lines: str) -> str:
    body = "".join(f"  {line},\n" for line in lines)
    return f"[layers]\nflow = [\n{body}]\n"


TOML = [
    Wrong("header-open", "[layers⟦\ncount = 2\n", "not valid TOML"),
    Wrong("no-value", "[let]\nd = ⟦\n", "not valid TOML"),
    Wrong("string-open", '[let]\nd = "cfg.hidden_size⟦\n', "not valid TOML: a string is not closed on this line"),
    Wrong("literal-open", "[let]\nd = ⟦'cfg.hidden_size\nH = 4\n", "not valid TOML: a string is not closed"),
    Wrong("literal-open-first", "[let]\nd = 'cfg.hidden_size⟦\nH = '4'\n", "a string is not closed on this line"),
    Wrong("key-twice", "[let]\nd = 1\nd = 2⟦\n", "not valid TOML"),
    Wrong("date", "[let]\nd = ⟦2024-05-01\n", "a date is not used", "string"),
    Wrong("array-of-tables", "[let]\nd = 8\n\n⟦[[layers]]\ncount = 2\n", "arrays of tables", "[name]"),
    Wrong("value-at-top", "count = ⟦2\n", "'count' is a value outside any table", "[let]"),
    Wrong(
        "model-key",
        '[model]\nflows = ⟦["x = token_embd(tokens)"]\n',
        "[model] has no key 'flows'",
        "did you mean 'flow'",
    ),
    Wrong(
        "match-key",
        '[match]\nmodel_types = ⟦["tiny"]\n',
        "[match] has no key 'model_types'",
        "did you mean 'model_type'",
    ),
    Wrong("gguf-key", '[gguf]\narchs = ⟦"tiny"\n', "[gguf] has no key 'archs'", "did you mean 'arch'"),
    Wrong("kind", '[model]\nkind = ⟦"encoder"\n', "kind 'encoder' is not served", "causal-lm"),
    Wrong("norms", "⟦[norms]\neps = 1e-5\n", "[norms] is neither a part nor a stack", "did you mean 'norm'"),
    Wrong(
        "base-typo", 'extends = ⟦"decodr"\n', "there is no spec called 'decodr'", "did you mean 'decoder'", extends=""
    ),
    Wrong("base-number", "extends = ⟦3\n", "'extends' is the name of a spec", "extends =", extends=""),
    Wrong("base-itself", 'extends = ⟦"wrong"\n', "extends itself", "circle", extends=""),
    Wrong("base-outside", 'extends = ⟦"../decoder"\n', "there is no spec called '../decoder'", extends=""),
    Wrong("base-is-data", 'extends = ⟦"blocks"\n', "there is no spec called 'blocks'", extends=""),
    Wrong("let-is-value", "let = ⟦3\n", "'let' must be a table", "[let]"),
    Wrong("model-is-value", 'model = ⟦"causal-lm"\n', "'model' must be a table", "[model]"),
    Wrong("no-model", "⟦[let]\nd = 8\n", "there is no [model]", 'extends = "decoder"', extends=""),
]

EXPRESSIONS = [
    Wrong(
        "syntax", let('"cfg.hidden_size // // 2"⟦').replace('"⟦', '"').replace('= "', '= ⟦"'), "is not an expression"
    ),
    Wrong("unknown-name", let('"⟦vocabb // 2"'), "unknown name 'vocabb'", "did you mean 'vocab'"),
    Wrong("unknown-in-sum", let('"d // 4 + ⟦zig"'), "unknown name 'zig'", "[let]"),
    Wrong("unknown-function", let('"2 * ⟦sqroot(d)"'), "unknown function 'sqroot'", "did you mean 'sqrt'"),
    Wrong("missing-value", let('"d // ⟦cfg.heads_of_mine"'), "'cfg.heads_of_mine' is missing (None)", "or"),
    Wrong("config-typo", let('"cfg.head_size or ⟦cfg.hiden_size // 4"'), "hiden_size'"),
    Wrong("lambda", let('"(⟦lambda: 2)()"'), "'lambda' is not allowed"),
    Wrong("comprehension", let('"sum(⟦[1 for j in [1, 2]])"'), "'listcomp' is not allowed"),
    Wrong("f-string", let('''"int(⟦f'{d}')"'''), "'joinedstr' is not allowed"),
    Wrong("walrus", let('"(⟦y := 2)"'), "'namedexpr' is not allowed"),
    Wrong("dunder", let('"⟦d.__class__"'), "'d' has no keys"),
    Wrong("private", let('"⟦_d"'), "'_d' is not allowed"),
    Wrong("method", let("""\"⟦cfg.model_type.upper()\""""), "only a plain name can be called"),
    Wrong("attribute-of-number", let('"⟦d.real"'), "'d' has no keys"),
    Wrong("import", let("""\"⟦__import__('os').system('true')\""""), "'__import__' is not allowed"),
    Wrong("power", let('"⟦9 ** 9 ** 9"'), "out of bounds"),
    Wrong("huge-int", let('"⟦2 ** 62 * 4"'), "64 bits"),
    Wrong("huge-literal", let(f'"⟦{"9" * 40}"'), "64 bits"),
    Wrong("too-many-digits", let(f'"⟦{"9" * 1900}"'), "64 bits"),
    Wrong("string-times", let("""\"⟦'ab' * 1000000\""""), "not a number"),
    Wrong("division-by-zero", let('"⟦d // 0"'), "cannot compute 'd // 0'"),
    Wrong("index", let('"⟦[1, 2][5]"'), "list index out of range", "length"),
    Wrong("compare", let('"2 if ⟦cfg.nothing > 3 else 1"'), "'cfg.nothing' is missing (None)"),
    Wrong("too-long", let(f'⟦"{LONG}"'), "at most 2000 characters"),
    Wrong("too-deep", let(f'⟦"{DEEP}"'), "too large", "[let]"),
    Wrong("parentheses", let(f'⟦"{"(" * 300}1{")" * 300}"'), "is not an expression"),
    Wrong("lone-layer", '[let]\nodd = "⟦i % 2"\nvocab = "16 + odd"\n', "unknown name 'i'", "stack"),
    Wrong("circle", '[let]\nd = ⟦"hd * H"\n', "[let] d -> hd -> d is a circle", "break"),
    Wrong("wrong-arguments", let('"⟦sqrt(4, 4)"'), "sqrt() failed", "arguments"),
    Wrong("keyword", let('"⟦round(2.2, ndigits=0)"'), "round() takes no keywords", "by position"),
]

FLOWS = [
    Wrong("flow-string", '[layers]\nflow = ⟦"x += attn(attn_norm(x))"\n', "a flow is a list", "flow = ["),
    Wrong("flow-empty", "[layers]\nflow = ⟦[]\n", "a flow is a list", "flow = ["),
    Wrong("flow-number", flow("⟦3"), "a line of a flow is a string", "x = f(x)"),
    Wrong("flow-expression", flow('⟦"attn(attn_norm(x))"'), "is not an assignment", "x = f(x)"),
    Wrong("flow-two", flow('⟦"x += attn(attn_norm(x)); x += ffn(ffn_norm(x))"'), "is not one assignment", "one"),
    Wrong("flow-import", flow('⟦"import os"'), "is not an assignment"),
    Wrong("flow-attribute", flow('⟦"x.y = attn(x)"'), "is not an assignment"),
    Wrong("flow-tuple", flow('⟦"a, b = attn(attn_norm(x))"'), "assigns 2 names from 1 values", "as many"),
    Wrong("flow-condition", flow('"x += attn(x) if ⟦x else ffn(x)"'), "'x' is a tensor", "settled"),
    Wrong("flow-and", flow('"x += ⟦x and ffn(x)"'), "'x' is a tensor", "settled"),
    Wrong("flow-comparison", flow('"x += attn(x) if ⟦x > 0 else ffn(x)"'), "tensors cannot be compared", "settled"),
    Wrong("flow-modulo", flow('"x += ⟦x % 2"'), "tensors have + - * / ** only", "floor"),
    Wrong("flow-none", flow('"x += x * ⟦cfg.nothing"'), "'cfg.nothing' is missing (None)", "combined"),
    Wrong("flow-part-typo", flow('"x += ⟦atn(attn_norm(x))"'), "'atn' cannot be called here", "did you mean 'attn'"),
    Wrong("flow-name-typo", flow('"x += attn(⟦xx)"'), "unknown name 'xx'", "did you mean 'x'"),
    Wrong("flow-of-numbers", flow('"x += ⟦round(x)"'), "'round' is a function of numbers, not of a tensor", "part"),
    Wrong("flow-no-tensor", flow('"x += ⟦sin(3)"'), "'sin' takes a tensor", "did you mean 'min'"),
    Wrong("flow-three", flow('"x += ⟦min(x, x, x)"'), "'min' got 3 arguments"),
    Wrong("flow-block", flow('"x += ⟦linear(x)"'), "'linear' is a block", "write a table for the part"),
    Wrong("flow-other-block", flow('"x += ⟦moe(x)"'), "'moe' is a block", 'block = "moe"'),
    Wrong("flow-function-typo", flow('"x += ⟦sofmax(x)"'), "'sofmax' cannot be called", "did you mean 'softmax'"),
    Wrong("flow-along-tokens", flow('"x += ⟦sum(positions)"'), "[tokens] has no axis but", "outer(x, range(n))"),
    Wrong("flow-outer-tokens", flow('"x += ⟦outer(x, positions)"'), "[tokens] has no axis but", "range"),
    Wrong("flow-range", flow('"x += ⟦range(0)"'), "range(0)", "positive"),
    Wrong("flow-concat", flow('"x += ⟦concat(x, heads(x, 2))"'), "as many axes", "heads(x, 1)"),
    Wrong("flow-no-argument", flow('"x += ⟦attn_norm()"'), "takes 1 tensor, it got 0"),
    Wrong("flow-two-arguments", flow('"x += ⟦attn_norm(x, x)"'), "takes 1 tensor, it got 2"),
    Wrong("flow-block-arguments", flow('"x += ⟦attn(x, x)"'), "takes 1 arguments (x), it got 2"),
    Wrong("flow-number-argument", flow('"x += attn(⟦3)"'), "takes tensors"),
    Wrong("flow-keyword", flow('"x += ⟦attn(x, window=3)"'), "takes tensors only", "table"),
    Wrong("flow-primitive-keyword", flow('"x += ⟦softcap(x, capp=3)"'), "no parameter 'capp'", "did you mean 'cap'"),
    Wrong("flow-primitive-missing", flow('"x += ⟦heads(x)"'), "heads needs 'n'", "give"),
    Wrong("flow-spread", flow('"x += ⟦rope(x, **theta)"'), "'**theta' is not a table", "table"),
    Wrong("flow-method", flow('"x += ⟦x.sum()"'), "only a plain name can be called"),
    Wrong("flow-tensor-attribute", flow('"x += ⟦x.shape"'), "'x' is a tensor"),
    Wrong("flow-tensor-index", flow('"x += ⟦x[0]"'), "'x' is a tensor", "split"),
    Wrong("flow-word", flow('''"x += ⟦'attn'"'''), "'attn', not a number"),
    Wrong("flow-list", flow('"x = [x, x]"', '"x = attn(⟦x)"'), "takes tensors"),
    Wrong("flow-softcap-word", flow('''"x = ⟦softcap(x, 'a')"'''), "'cap' must be number"),
    Wrong("flow-lambda", flow('"x = (⟦lambda y: y)(x)"'), "'lambda' is not allowed"),
    Wrong(
        "flow-stack-arguments",
        '[model]\nflow = ["x = token_embd(tokens)", "x = ⟦layers(x, x)", "logits = output(x)"]\n',
        "'layers' takes 1 arguments (x), it got 2",
    ),
    Wrong(
        "flow-no-logits",
        '[model]\nflow = ["x = layers(token_embd(tokens))", ⟦"y = heads(x, 2)"]\n',
        "must end in logits",
    ),
    Wrong("flow-not-tensor", '[model]\nflow = [⟦"x = 3"]\n', "must end in logits"),
    Wrong(
        "flow-embed-of-float",
        '[model]\nflow = ["x = token_embd(tokens)", "x = ⟦token_embd(x)", "logits = output(x)"]\n',
        "takes integer ids",
    ),
]

TEXT = TOML + EXPRESSIONS + FLOWS
