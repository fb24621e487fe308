//! Checks refusals. For each refusal, one line names the cause, the status is 2, and the output is neither created nor
//! changed.
//!
//! Each row puts one fault into a valid configuration or a valid input.

use crate::support::{Content, Folder, assert_refused, input};

const CONFIG: &str = r#"{"optimizer":"adam","groups":[{"params":["a","b.c"]}]}"#;

fn fine() -> Content {
    input(&[("a", &[2, 3]), ("b.c", &[4])], 2)
}

/// Checks that the command is refused: once without an output file, and once with an old one that must stay unchanged.
fn refuse(folder: &Folder, more: &[&str], word: &str) {
    let before = folder.names();
    assert_refused(&folder.replay(more), word);
    assert_eq!(folder.names(), before, "{word}: a file is left over");
    folder.write("OUT", b"as it was");
    assert_refused(&folder.replay(more), word);
    assert_eq!(folder.read("OUT"), b"as it was", "{word}");
    assert_eq!(folder.names().len(), before.len() + 1, "{word}: a file is left over");
    std::fs::remove_file(folder.path("OUT")).unwrap();
}

#[test]
fn the_pair_that_the_rows_break_is_fine() {
    assert!(Folder::of(CONFIG, &fine()).replay(&[]).status.success());
}

#[test]
fn configurations_with_one_fault_are_refused_by_name() {
    let with = |key: &str| CONFIG.replace(r#""groups""#, &format!(r#"{key},"groups""#));
    let option = |key: &str| CONFIG.replace("]}]", &format!("],{key}}}]"));
    let of = |optimizer: &str, key: &str| option(key).replace("adam", optimizer);
    let sgd = |key: &str| of("sgd", key);
    let rows = [
        (String::new(), "EOF"),
        ("{".into(), "EOF"),
        (format!("{CONFIG}x"), "trailing"),
        ("[\"adam\",[]]".into(), "expected an object"),
        ("\u{feff}{}".into(), "expected value"),
        ("[".repeat(100_000), "expected an object"),
        (CONFIG.replace("\"adam\"", &"[".repeat(100_000)), "expected a string"),
        (CONFIG.replace("adam", "Adam"), "\"Adam\""),
        (CONFIG.replace("adam", "lars"), "use one of sgd, adam, adamw, adagrad"),
        (CONFIG.replace("\"adam\"", "null"), "null"),
        (CONFIG.replace("\"optimizer\":\"adam\",", ""), "missing field `optimizer`"),
        (r#"{"optimizer":"adam"}"#.into(), "missing field `groups`"),
        (r#"{"optimizer":"adam","groups":[]}"#.into(), "groups: empty"),
        (r#"{"optimizer":"adam","groups":{}}"#.into(), "expected a sequence"),
        (r#"{"optimizer":"adam","groups":[[["a","b.c"],0.1]]}"#.into(), "expected an object"),
        (CONFIG.replace(r#"["a","b.c"]"#, "[]"), "groups[0].params"),
        (r#"{"optimizer":"adam","groups":[{"lr":1}]}"#.into(), "groups[0].params"),
        (CONFIG.replace("b.c", "a"), "`a` a second time"),
        (CONFIG.replace("]}]", r#"]},{"params":["a"]}]"#), "groups[1]: names `a`"),
        (CONFIG.replace("b.c", ""), "which is in no group"),
        (CONFIG.replace("b.c", "d"), "b.c"),
        (CONFIG.replace("]}]", r#",    "d"]}]"#), "`param.d`: missing"),
        (CONFIG.replace(r#","b.c""#, ""), "`b.c`, which is in no group"),
        (with(r#""world_size":0"#), "config: C.json: world_size = 0: out of range; use 1 or more"),
        (with(r#""world_size":-1"#), "integer `-1`, expected a whole number"),
        (with(r#""world_size":1.5"#), "1.5"),
        (with(r#""world_size":4294967296"#), "4294967296"),
        (with(r#""world_size":8,"world_size":8"#), "duplicate field `world_size`"),
        (with(r#""optimizer":"adam""#), "duplicate field `optimizer`"),
        (with(r#""World_size":8"#), "World_size"),
        (with(r#""clip":{"global":0}"#), "clip.global = 0: out of range; use a number above 0"),
        (with(r#""clip":{"global":-1}"#), "clip.global = -1: out of range"),
        (with(r#""clip":{"global":1e39}"#), "clip.global = 1000"),
        (with(r#""clip":{"global":"1"}"#), "string"),
        (with(r#""clip":{"global":NaN}"#), "expected value"),
        (with(r#""clip":{"global":1,"previous":1}"#), "clip: not one known norm; use {"),
        (with(r#""clip":{"per_bucket":1}"#), "clip: not one known norm"),
        (with(r#""clip":{}"#), "clip: not one known norm"),
        (with(r#""clip":1"#), "expected an object"),
        (with(r#""loss_scale":0"#), "loss_scale"),
        (with(r#""loss_scale":-2"#), "loss_scale = -2 with world_size = 1"),
        (with(r#""loss_scale":1e300"#), "loss_scale"),
        (with(r#""loss_scale":null"#), "null"),
        (with(r#""loss_scale":[2]"#), "expected a number, or an object"),
        (with(r#""skip_nonfinite":1"#), "1"),
        (with(r#""dtypes":null"#), "null"),
        (with(r#""dtypes":["bf16"]"#), "expected an object"),
        (with(r#""dtypes":{"params":"bf16"}"#), "unknown field `params`"),
        (with(r#""dtypes":{"param":"bf16","param":"bf16"}"#), "duplicate field `param`"),
        (with(r#""dtypes":{"param":"BF16"}"#), "dtypes.param = \"BF16\": unknown; use one of f32, bf16, f16"),
        (with(r#""dtypes":{"param":{"bf16":null}}"#), "expected a string"),
        (with(r#""dtypes":{"grad":"f64"}"#), "dtypes.grad = \"f64\""),
        (with(r#""dtypes":{"master":"bf16"}"#), "use one of none, f32, remainder16, remainder8"),
        (
            with(r#""dtypes":{"master":"f32"}"#),
            "dtypes.master = f32: f32 parameters need no master; leave the master out",
        ),
        (
            with(r#""dtypes":{"param":"f16","master":"remainder16"}"#),
            "dtypes.master = remainder16: remainders exist only for bf16 parameters; use an f32 master",
        ),
        (
            with(r#""dtypes":{"moments":"f16"}"#),
            "dtypes.moments = \"f16\": unknown; use one of f32, bf16, 8bit",
        ),
        (with(r#""dtypes":{"rounding":"up"}"#), "dtypes.rounding = \"up\""),
        (with(r#""dtypes":{"rounding":"stochastic"}"#), "dtypes.rounding = stochastic: neither"),
        (with(r#""dtypes":{"param":"f16","rounding":"stochastic"}"#), "dtypes.rounding"),
        (with(r#""dtypes":{"moments":"bf16","seed":1}"#), "dtypes.seed = 1"),
        (with(r#""dtypes":{"moments":"bf16","rounding":"stochastic","seed":-1}"#), "-1"),
        (with(r#""copy":"f64""#), "copy = \"f64\": unknown; use one of f32, bf16, f16"),
        (with(r#""ema":1.5"#), "ema = 1.5"),
        (with(r#""ema":-1"#), "ema = -1"),
        (with(r#""frozen":["d"]"#), "frozen: names `d`"),
        (with(r#""frozen":["a","a"]"#), "frozen: names `a` a second time"),
        (with(r#""frozen":["a"]"#), "`grad.0.a`: `a` is frozen"),
        (with(r#""lr_multipliers":{"d":1}"#), "lr_multipliers: names `d`, which is in no group"),
        (with(r#""lr_multipliers":{"a":1,"a":1}"#), "`a` occurs twice"),
        (with(r#""lr_multipliers":[1]"#), "expected an object"),
        (with(r#""lr_multipliers":null"#), "null"),
        (with(r#""lr_multipliers":{"a":"2"}"#), "string"),
        (with(r#""lr_multipliers":{"a":-1}"#), "lr_multipliers.`a`: lr_multiplier = -1"),
        (with(r#""lr_multipliers":{"a":1e300}"#), "lr_multipliers.`a`: lr_multiplier = 1e300"),
        (option(r#""lr":-1"#), "lr = -1"),
        (option(r#""lr":NaN"#), "expected value"),
        (option(r#""lr":1e39"#), "lr"),
        (option(r#""lr":1e999"#), "out of range"),
        (option(r#""lr":1e-60"#), "lr"),
        (option(r#""lr":"0.1""#), "string"),
        (option(r#""lr":null"#), "null"),
        (option(r#""lr":1,"lr":1"#), "duplicate field `lr`"),
        (option(r#""LR":1"#), "unknown field `LR`"),
        (option(r#""momentum":0.9"#), "unknown field `momentum`"),
        (option(r#""betas":[0.9]"#), "two numbers, not 1"),
        (option(r#""betas":[0.9,0.9,0.9]"#), "two numbers, not 3"),
        (option(r#""betas":[1.0,0.9]"#), "betas.0 = 1"),
        (option(r#""betas":[0.9,-0.1]"#), "betas.1 = -0.1"),
        (option(r#""eps":-1e-8"#), "eps"),
        (option(r#""weight_decay":-1"#), "weight_decay"),
        (option(r#""amsgrad":"yes""#), "yes"),
        (option(r#""a\nb":1"#), "a\\nb"),
        (option(r#""max_norm":null,"max_norm":1"#), "duplicate field `max_norm`"),
        (option(r#""max_norm":-1"#), "group_clip"),
        (option(r#""max_norm":"none""#), "string"),
        (sgd(r#""betas":[0.9,0.9]"#), "unknown field `betas`"),
        (sgd(r#""momentum":-1"#), "momentum"),
        (sgd(r#""dampening":1e39"#), "dampening"),
        (sgd(r#""nesterov":true"#), "nesterov"),
        (of("adagrad", r#""alpha":0.9"#), "unknown field `alpha`"),
        (of("adagrad", r#""lr_decay":-1"#), "lr_decay"),
        (of("rmsprop", r#""alpha":1.1"#), "alpha"),
        (of("rmsprop", r#""centered":1"#), "expected a boolean"),
        (of("adadelta", r#""rho":-0.1"#), "rho"),
        (of("adamax", r#""amsgrad":true"#), "unknown field `amsgrad`"),
        (of("lamb", r#""amsgrad":true"#), "unknown field `amsgrad`"),
    ];
    for (config, word) in rows {
        refuse(&Folder::of(&config, &fine()), &[], word);
    }
    let nameless = input(&[("a", &[1]), ("", &[1])], 1);
    refuse(&Folder::of(&CONFIG.replace("b.c", ""), &nameless), &[], "empty name");
    let folder = Folder::of(CONFIG, &fine());
    folder.write("C.json", b"{\"optimizer\":\"\xff\"}");
    refuse(&folder, &[], "unicode");
}

#[test]
fn inputs_with_one_fault_are_refused_by_name() {
    let moments = || {
        let content = fine().with("state.a.exp_avg", &[2, 3], &[0.0; 6]);
        content.with("state.a.exp_avg_sq", &[2, 3], &[0.0; 6])
    };
    let without = |name: &str| {
        let mut content = fine();
        content.tensors.remove(name).unwrap();
        content
    };
    let rows = [
        (without("param.a"), "`param.a`: missing"),
        (without("grad.0.a"), "`grad.0.a`: missing; give it one in every pass"),
        (without("grad.1.b.c"), "`grad.1.b.c`: missing"),
        (fine().with("grad.3.a", &[2, 3], &[0.0; 6]), "`grad.2.a`: missing"),
        (fine().with("grad.18446744073709551615.a", &[2, 3], &[0.0; 6]), "`grad.2.a`: missing"),
        (fine().with("grad.18446744073709551616.a", &[2, 3], &[0.0; 6]), "grad.18446744073709551616.a"),
        (fine().with("grad.01.a", &[2, 3], &[0.0; 6]), "grad.01.a"),
        (fine().with("grad.-1.a", &[2, 3], &[0.0; 6]), "grad.-1.a"),
        (fine().with("grad.a", &[2, 3], &[0.0; 6]), "grad.a"),
        (fine().with("grad.0.b.c", &[5], &[0.0; 5]), "`grad.0.b.c`: has shape [5]"),
        (fine().with("grad.0.a", &[3, 2], &[0.0; 6]), "`grad.0.a`: has shape [3, 2]"),
        (fine().with("param.d", &[1], &[0.0]), "`d`, which is in no group"),
        (fine().with("grad.0.d", &[1], &[0.0]), "grad.0.d"),
        (fine().with("state.d.exp_avg", &[1], &[0.0]), "state.d.exp_avg"),
        (fine().with("loss", &[1], &[0.0]), "`loss`"),
        (fine().with("master.a", &[2, 3], &[0.0; 6]), "`master.a`: the configuration asks for none"),
        (fine().with("copy.a", &[2, 3], &[0.0; 6]), "`copy.a`: the configuration asks for none"),
        (fine().with("ema.b.c", &[4], &[0.0; 4]), "`ema.b.c`: the configuration asks for none"),
        (fine().with("ema.d", &[4], &[0.0; 4]), "`d`, which is in no group"),
        (fine().with("Param.a", &[1], &[0.0]), "Param.a"),
        (fine().with("state.a.momentum_buffer", &[2, 3], &[0.0; 6]), "momentum_buffer"),
        (moments().with("state.a.max_exp_avg_sq", &[2, 3], &[0.0; 6]).with_count("a", "1"), "max_exp_avg_sq"),
        (moments().with("state.a.exp_avg", &[6], &[0.0; 6]).with_count("a", "1"), "state.a.exp_avg"),
        (moments(), "`step.a`: missing"),
        (
            fine().with("state.a.exp_avg", &[2, 3], &[0.0; 6]).with_count("a", "1"),
            "`state.a.exp_avg_sq`: missing",
        ),
        (fine().with_count("a", "1"), "`state.a.exp_avg`: missing"),
        (moments().with_count("a", "-1"), "step.a"),
        (moments().with_count("a", "+1"), "step.a"),
        (moments().with_count("a", "01"), "step.a"),
        (moments().with_count("a", "1.0"), "step.a"),
        (moments().with_count("a", ""), "step.a"),
        (moments().with_count("a", "18446744073709551616"), "step.a"),
        (moments().with_count("a", "9223372036854775808"), "step.a"),
        (moments().with_count("a", "9223372036854775807"), "no room"),
        (moments().with_count("a", "9223372036854775806"), "no room"),
        (fine().with_count("d", "1"), "step.d"),
        (Content::default(), "`param.a`: missing"),
    ];
    for (content, word) in rows {
        refuse(&Folder::of(CONFIG, &content), &[], word);
    }
}

/// A tensor file made by hand.
fn raw(header: &str, data_bytes: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data_bytes]].concat()
}

fn entry(name: &str, dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

#[test]
fn hostile_tensor_files_are_refused_by_name() {
    let config = r#"{"optimizer":"sgd","groups":[{"params":["a"]}]}"#;
    let one =
        |dtype: &str, shape: &str, offsets: &str| format!("{{{}}}", entry("param.a", dtype, shape, offsets));
    let fine = one("F32", "[1]", "[0,4]");
    let two = |a: &str, b: &str| {
        format!("{{{},{}}}", entry("param.a", "F32", "[1]", a), entry("grad.0.a", "F32", "[1]", b))
    };
    let many_dims = format!("[{}]", ["4294967296"; 9].join(","));
    let rows: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "too few"),
        (vec![0; 7], "too few"),
        (vec![0; 8], "not a JSON object"),
        (u64::MAX.to_le_bytes().to_vec(), "claims a header of 18446744073709551615 bytes"),
        (raw(&fine, 4)[..20].to_vec(), "claims a header"),
        (raw(&fine, 3), "tensor `param.a`"),
        (raw(&fine, 5), "5 bytes of data"),
        (raw("", 4), "not a JSON object"),
        (raw("[]", 0), "not a JSON object"),
        (raw(&format!(" {fine}"), 4), "not a JSON object"),
        (raw("{", 0), "header"),
        (raw(&format!("{fine}{fine}"), 4), "trailing"),
        (raw(&one("I64", "[1]", "[0,8]"), 8), "`param.a`: has dtype I64, not F32, BF16 or F16"),
        (raw(&fine.replace("F32", "f32"), 4), "dtype `f32`"),
        (raw(&one("F64", "[1]", "[0,8]"), 8), "dtype F64"),
        (raw(&one("F32", "[2]", "[0,4]"), 4), "`param.a`: has shape [2]"),
        (raw(&one("F32", "[-1]", "[0,4]"), 4), "-1"),
        (raw(&one("F32", "[1.0]", "[0,4]"), 4), "1.0"),
        (raw(&one("F32", "1", "[0,4]"), 4), "integer"),
        (raw(&one("F32", &many_dims, "[0,4]"), 4), "do not agree"),
        (raw(&one("F32", "[4611686018427387905]", "[0,4]"), 4), "do not agree"),
        (raw(&one("F32", "[1]", "[0,4,8]"), 4), "header"),
        (raw(&one("F32", "[1]", "[0]"), 4), "header"),
        (raw(&one("F32", "[1]", "[4,0]"), 4), "lies at 4..0"),
        (raw(&one("F32", "[1]", "[0,18446744073709551612]"), 4), "lies at"),
        (raw(&one("F32", "[1]", "[4,8]"), 8), "lies at 4..8"),
        (raw(&two("[0,4]", "[0,4]"), 8), "lies at 0..4"),
        (raw(&two("[0,4]", "[2,6]"), 8), "lies at 2..6"),
        (raw(&two("[0,4]", "[8,12]"), 12), "lies at 8..12"),
        (raw(&format!("{{{0},{0}}}", entry("param.a", "F32", "[1]", "[0,4]")), 4), "`param.a` occurs twice"),
        (raw(&fine.replace("\"shape\"", "\"shape\":[1],\"shape\""), 4), "duplicate field `shape`"),
        (raw(&fine.replace("\"shape\"", "\"device\":0,\"shape\""), 4), "device"),
        (raw(r#"{"param.a":["F32",[1],[0,4]]}"#, 4), "expected an object"),
        (raw(r#"{"__metadata__":{"step.a":1}}"#, 0), "string"),
        (raw(r#"{"__metadata__":{"x":"1","x":"1"}}"#, 0), "`x` occurs twice"),
        (raw(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), "`__metadata__` occurs twice"),
        (raw(&format!("{{\"a\":{}", "[".repeat(100_000)), 0), "header"),
    ];
    for (bytes, word) in rows {
        let folder = Folder::of(config, &Content::default());
        folder.write("IN", &bytes);
        refuse(&folder, &[], word);
    }
    let folder = Folder::of(config, &Content::default());
    folder.write("IN", &raw(&fine, 4));
    assert!(folder.replay(&[]).status.success(), "the file that the rows break is fine");
}

#[test]
fn a_sparse_file_of_a_terabyte_is_refused_without_reading_it() {
    let folder = Folder::of(CONFIG, &fine());
    for name in ["IN", "C.json"] {
        let folder = Folder::of(CONFIG, &fine());
        std::fs::File::create(folder.path(name)).unwrap().set_len(1 << 40).unwrap();
        refuse(&folder, &[], if name == "IN" { "not a JSON object" } else { "longer than" });
    }
    assert!(folder.replay(&[]).status.success());
}

#[test]
fn options_out_of_range_are_refused() {
    let folder = Folder::of(CONFIG, &fine());
    for (more, word) in [
        (&["--mode", "lazy"][..], "lazy"),
        (&["--isa", "sse9"], "sse9"),
        (&["--device", "cuda"], "cuda"),
        (&["--bucket-cap-bytes", "0"], "bucket_cap_bytes"),
        (&["--bucket-cap-bytes", "-1"], "-1"),
        (&["--threads", "0"], "threads"),
        (&["--threads", "1025"], "threads"),
        (&["--threads", "x"], "'x'"),
        (&["--colour"], "--colour"),
        (&["--threads"], "--threads"),
    ] {
        refuse(&folder, more, word);
    }
    for key in [r#""clip":{"global":1}"#, r#""skip_nonfinite":true"#] {
        let config = CONFIG.replace(r#""groups""#, &format!(r#"{key},"groups""#));
        refuse(&Folder::of(&config, &fine()), &["--mode", "eager"], key.split('"').nth(1).unwrap());
    }
    for (name, value) in [("INSTEP_ISA", "x"), ("INSTEP_THREADS", "0"), ("INSTEP_DEADLINE_MS", "")] {
        let arguments = ["replay", "--config", "C.json", "--input", "IN", "--output", "OUT"];
        let output = folder.command(&arguments).env(name, value).output().unwrap();
        assert_refused(&output, "; use ");
    }
}

#[test]
fn an_unknown_command_gets_the_list_of_known_ones() {
    assert_refused(
        &Folder::of(CONFIG, &fine()).run(&["reply"]),
        "; commands: info, replay, diff, plan, bench",
    );
}
