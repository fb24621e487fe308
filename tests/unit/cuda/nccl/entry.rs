//! Tests of the records by which ranks say how they enter a group.
//!
//! What ranks say is read alike on all of them, and names who said what.

use super::*;

fn read(entries: &[Entry]) -> Result<Vec<Record>> {
    let record = |(rank, entry): (usize, &Entry)| Record { entry: *entry, id: [rank as u8; 128] }.encode();
    let bytes: Vec<u8> = entries.iter().enumerate().flat_map(record).collect();
    let records = Record::read_all(&bytes)?;
    assert_eq!(records.iter().map(|record| record.entry).collect::<Vec<_>>(), entries);
    assert!((0..).zip(&records).all(|(rank, record)| record.id == [rank; 128]));
    Ok(records)
}

fn group(first: u32, count: u32) -> Entry {
    Entry::Communicator { first, count }
}

#[test]
fn ranks_that_make_the_same_have_each_others_records() {
    read(&[Entry::Stepper(u64::MAX); 3]).unwrap();
    read(&[group(0, 3); 3]).unwrap();
    // Neighbours, replicas, and a group of one beside the others.
    read(&[group(0, 2), group(0, 2), group(2, 2), group(2, 2)]).unwrap();
    read(&[group(0, 2), group(1, 2), group(0, 2), group(1, 2)]).unwrap();
    read(&[group(0, 1), group(1, 2), group(1, 2)]).unwrap();
}

#[test]
fn ranks_that_differ_learn_who_said_what() {
    let say = |number| Entry::Stepper(number);
    let expected = Error::Mismatch {
        rank: 0,
        ours: say(0).to_string(),
        other_rank: 2,
        theirs: say(1).to_string(),
        differs: difference(0, 1).unwrap().to_owned(),
    };
    assert_eq!(read(&[say(0), say(0), say(1), say(0)]), Err(expected));
    let Err(Error::Mismatch { differs, .. }) = read(&[say(0), group(0, 2)]) else { panic!() };
    assert_eq!(differs, "kind");
}

#[test]
fn ranks_whose_groups_do_not_fit_are_told_and_not_left_to_wait() {
    // A number that differs, a member that names another group, one that names a rank elsewhere.
    for groups in [[(0, 2), (0, 3), (2, 1)], [(0, 2), (1, 1), (2, 1)], [(0, 1), (2, 1), (2, 1)]] {
        let entries = groups.map(|(first, count)| group(first, count));
        let Err(Error::Mismatch { differs, ours, .. }) = read(&entries) else { panic!("{groups:?}") };
        assert!(differs == "members" && ours.contains("is number 0"), "{differs} {ours}");
    }
}

#[test]
fn bytes_that_no_rank_sends_name_their_rank() {
    let mut bytes = [Record { entry: Entry::Stepper(1), id: [0; 128] }.encode(); 2].concat();
    bytes[Record::BYTES] = 7;
    assert!(matches!(Record::read_all(&bytes), Err(Error::PeerLost { rank: 1, .. })));
}
