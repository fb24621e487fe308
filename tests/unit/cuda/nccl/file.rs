//! Tests of the file through which rank 0 hands out NCCL's id.
//!
//! A file of an earlier run never joins ranks of a later one.

use super::*;

const SHORT: Duration = Duration::from_millis(100);

fn options(rank: u32, job: &str, deadline: Duration) -> Options {
    Options { rank, world_size: 3, job: job.to_owned(), deadline, ..Options::default() }
}

fn place() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("id");
    (folder, path)
}

fn of(options: &Options, run: u8, id: u8) -> String {
    text(options, &Found { run: [run; 128], id: [id; 128] })
}

/// Joins with an id that all ranks must have, as in NCCL.
fn join(rank: u32, path: &Path, made: u8) -> Result<UniqueId> {
    let options = options(rank, "a test", Duration::from_secs(60));
    meet(&options, path, || Ok([made; 128]), |id, _, _| Ok(*id))
}

#[test]
fn ranks_get_rank_0s_id_and_the_file_goes_once_all_have_it() {
    let (folder, path) = place();
    // A file that another job has left.
    fs::write(&path, of(&options(0, "another test", SHORT), 9, 9)).unwrap();
    let barrier = std::sync::Barrier::new(3);
    let ids: Vec<UniqueId> = thread::scope(|scope| {
        let one = |rank| {
            let (path, barrier) = (&path, &barrier);
            scope.spawn(move || {
                let connect = |id: &UniqueId, _, _: &dyn Fn() -> Result<()>| {
                    barrier.wait();
                    Ok(*id)
                };
                let options = options(rank, "a test", Duration::from_secs(60));
                meet(&options, path, || Ok([7; 128]), connect).unwrap()
            })
        };
        [2, 1, 0].map(one).map(|thread| thread.join().unwrap()).into()
    });
    assert_eq!(ids, [[7; 128]; 3]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_second_group_takes_the_second_id_although_the_first_is_still_there() {
    let (_folder, path) = place();
    let zero = options(0, "a test", SHORT);
    fs::write(&path, of(&zero, 21, 21)).unwrap();
    assert_eq!(join(1, &path, 0).unwrap(), [21; 128]);
    thread::scope(|scope| {
        let again = scope.spawn(|| join(1, &path, 0).unwrap());
        // Another rank of this process takes the id that the first one had.
        assert_eq!(join(2, &path, 0).unwrap(), [21; 128]);
        write(&path, &of(&zero, 21, 22)).unwrap();
        assert_eq!(again.join().unwrap(), [22; 128]);
    });
}

#[test]
fn an_id_that_a_run_of_the_same_name_has_left_is_given_up_once_rank_0_has_written_its_own() {
    let (_folder, path) = place();
    let own = options(1, "a test", Duration::from_secs(60));
    fs::write(&path, of(&own, 31, 31)).unwrap();
    let connect = |id: &UniqueId, _, wanted: &dyn Fn() -> Result<()>| {
        if *id == [31; 128] {
            // Nobody answers there.
            write(&path, &of(&own, 32, 32)).unwrap();
            loop {
                wanted()?;
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(*id)
    };
    assert_eq!(meet(&own, &path, || Ok([0; 128]), connect).unwrap(), [32; 128]);
}

#[test]
fn a_rank_that_still_joins_when_rank_0_begins_the_next_group_stays() {
    let (_folder, path) = place();
    let own = options(1, "a test", Duration::from_secs(60));
    fs::write(&path, of(&own, 41, 41)).unwrap();
    let connect = |id: &UniqueId, _, wanted: &dyn Fn() -> Result<()>| {
        write(&path, &of(&own, 41, 42)).unwrap();
        for _ in 0..3 {
            thread::sleep(POLL);
            wanted()?;
        }
        Ok(*id)
    };
    assert_eq!(meet(&own, &path, || Ok([0; 128]), connect).unwrap(), [41; 128]);
    assert_eq!(join(1, &path, 0).unwrap(), [42; 128]);
}

#[test]
fn an_id_by_which_nobody_answers_is_given_up_for_the_one_that_rank_0_writes_later() {
    let (_folder, path) = place();
    let own = options(1, "a test", Duration::MAX);
    fs::write(&path, of(&own, 51, 51)).unwrap();
    let refusal = || {
        let (call, message) = ("ncclCommInitRankConfig", "connection refused".to_owned());
        Error::Collective { rank: 1, call, code: 6, message }
    };
    let connect = |id: &UniqueId, _, _: &dyn Fn() -> Result<()>| {
        if *id == [52; 128] { Ok(*id) } else { Err(refusal()) }
    };
    thread::scope(|scope| {
        let one = scope.spawn(|| meet(&own, &path, || Ok([0; 128]), connect));
        thread::sleep(4 * POLL);
        write(&path, &of(&own, 52, 52)).unwrap();
        assert_eq!(one.join().unwrap().unwrap(), [52; 128]);
    });
    // If rank 0 never writes, the refusal is the cause.
    fs::write(&path, of(&own, 53, 53)).unwrap();
    let own = Options { deadline: SHORT, ..own };
    let alone = meet(&own, &path, || Ok([0; 128]), connect);
    assert!(matches!(&alone, Err(Error::Collective { code: 6, .. })), "{alone:?}");
}

#[test]
fn a_later_call_waits_for_another_id_than_the_one_that_was_tried_in_vain() {
    let (_folder, path) = place();
    let own = options(1, "a test", SHORT);
    fs::write(&path, of(&own, 71, 71)).unwrap();
    let given_up = |id: &UniqueId, left: Duration, _: &dyn Fn() -> Result<()>| -> Result<()> {
        assert_eq!(*id, [71; 128]);
        thread::sleep(left);
        Err(Error::Hook("the deadline".to_owned()))
    };
    meet(&own, &path, || Ok([0; 128]), given_up).unwrap_err();
    thread::scope(|scope| {
        let again = scope.spawn(|| join(1, &path, 0).unwrap());
        thread::sleep(4 * POLL);
        write(&path, &of(&own, 71, 72)).unwrap();
        assert_eq!(again.join().unwrap(), [72; 128]);
    });
}

#[test]
fn rank_0_of_an_old_run_leaves_the_file_of_its_successor() {
    let (_folder, path) = place();
    let [old, new] = ["a test:0", "a test:1"].map(|job| options(0, job, SHORT));
    let late = |_: &UniqueId, _, _: &dyn Fn() -> Result<()>| -> Result<()> {
        write(&path, &of(&new, 62, 62)).unwrap();
        Err(Error::Hook("late".to_owned()))
    };
    meet(&old, &path, || Ok([61; 128]), late).unwrap_err();
    assert_eq!(read(&new, &path).unwrap().id, [62; 128]);
}

#[test]
fn a_rank_whose_file_never_comes_says_what_is_there() {
    let (_folder, path) = place();
    let cases = [
        (None, "No such file"),
        (Some(of(&options(0, "another test", SHORT), 9, 9)), "another job's"),
        (Some(title(&options(0, "a test", SHORT)) + "0011\n0011\n"), "no id"),
        (Some(of(&options(0, "a test", SHORT), 9, 9).replace("09", "0x")), "no id"),
    ];
    for (there, expected) in cases {
        there.iter().for_each(|text| fs::write(&path, text).unwrap());
        let options = options(1, "a test", SHORT);
        match meet(&options, &path, || Ok([0; 128]), |id, _, _| Ok(*id)) {
            Err(Error::Deadline { rank: 1, call, missing, .. }) => {
                assert!(call.contains(expected) && missing == [0], "{call}");
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn a_folder_that_is_not_there_is_named_by_rank_0() {
    let missing = place().1.with_file_name("nowhere/id");
    match join(0, &missing, 1) {
        Err(Error::File { what, .. }) => assert!(what.contains("nowhere"), "{what}"),
        other => panic!("{other:?}"),
    }
}
