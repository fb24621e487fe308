//! Tests of the options of a group, and of those that torchrun's variables give.
//!
//! A variable that is needed and missing, or out of range, is refused by its name.

use super::*;

const TORCHRUN: [(&str, &str); 6] = [
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_RUN_ID", "none"),
];

/// Reads the variables as torchrun sets them, with changes; an empty value unsets one.
fn read(changes: &[(&str, &str)]) -> Result<Options> {
    Options::read(|name| {
        let own = changes.iter().chain(&TORCHRUN).find(|(key, _)| *key == name);
        own.filter(|(_, value)| !value.is_empty()).map(|(_, value)| (*value).to_owned())
    })
}

fn refused(changes: &[(&str, &str)]) -> &'static str {
    match read(changes) {
        Err(Error::Config { field, .. }) => field,
        other => panic!("{changes:?}: {other:?}"),
    }
}

#[test]
fn torchruns_variables_say_who_a_rank_is_and_name_the_run_and_its_restart() {
    let options = read(&[]).unwrap();
    let job = "none:2:29400".to_owned();
    assert_eq!(options, Options { rank: 5, world_size: 8, device: 1, job, ..Options::default() });
    assert_eq!(read(&[("INSTEP_DEADLINE_MS", "250")]).unwrap().deadline, Duration::from_millis(250));
    assert!(read(&[("INSTEP_LEDGER", "1")]).unwrap().ledger);
    assert!(read(&[("TORCHELASTIC_RUN_ID", "")]).unwrap().refuse_job().is_err());
}

#[test]
fn no_blocks_at_all_are_refused() {
    let refused = |ctas| Options { ctas, ..Options::default() }.refuse();
    let zero = Some(0);
    let fields =
        [Ctas { most: zero, ..Ctas::default() }, Ctas { nvls: zero, ..Ctas::default() }].map(refused);
    assert!(matches!(fields[0], Err(Error::Config { field: "ctas.most", .. })));
    assert!(matches!(fields[1], Err(Error::Config { field: "ctas.nvls", .. })));
    assert!(refused(Ctas { most: Some(8), efficient: true, nvls: Some(4) }).is_ok());
}

#[test]
fn a_variable_that_is_missing_or_out_of_range_is_named() {
    for name in ["RANK", "WORLD_SIZE"] {
        assert_eq!(refused(&[(name, "")]), name);
    }
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "INSTEP_LEDGER"] {
        for value in ["-1", "x", "99999999999"] {
            assert_eq!(refused(&[(name, value)]), name, "{value}");
        }
    }
    assert_eq!(refused(&[("RANK", "8")]), "RANK");
    assert_eq!(refused(&[("WORLD_SIZE", "0")]), "WORLD_SIZE");
    assert_eq!(refused(&[("INSTEP_DEADLINE_MS", "0")]), "INSTEP_DEADLINE_MS");
}
