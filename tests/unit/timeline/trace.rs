//! Tests of a timeline as a trace that browsers open.
//!
//! No nanosecond is lost in the conversion to microseconds.

use super::*;
use crate::timeline::block::samples;
use serde_json::Value;

fn parse(lanes: &[Lane]) -> Vec<Value> {
    let mut text = String::new();
    write_trace(&mut text, lanes).unwrap();
    let parsed: Value = serde_json::from_str(&text).unwrap();
    parsed["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn a_trace_is_json_that_holds_every_nanosecond() {
    let (ran, blocked) = samples::two_passes();
    let lanes = [0, 3].map(|rank| Lane { rank, ran: &ran, blocked: &blocked });
    let events = parse(&lanes);
    let complete: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(complete.len(), 2 * (ran.len() + blocked.len()));
    for (stream, expected) in Stream::ALL.iter().zip([
        blocked.iter().map(|wait| wait.ns()).sum::<u64>(),
        ran.iter().filter(|r| r.op.stream == Stream::Reduce).map(|r| r.interval.ns()).sum(),
        ran.iter().filter(|r| r.op.stream == Stream::Optim).map(|r| r.interval.ns()).sum(),
    ]) {
        let of_stream = complete.iter().filter(|e| e["pid"] == 3 && e["tid"] == stream.index());
        let micros: f64 = of_stream.map(|event| event["dur"].as_f64().unwrap()).sum();
        assert_eq!((micros * 1e3).round() as u64, expected, "{stream:?}");
    }
    let step = complete.iter().find(|event| event["name"] == "step 1").unwrap();
    assert_eq!((&step["args"]["pass"], &step["args"]["bucket"]), (&7.into(), &1.into()));
    assert_eq!((step["ts"].as_f64(), &step["cat"]), (Some(4.2), &"step".into()));
}

#[test]
fn ranks_and_streams_are_named() {
    let events = parse(&[Lane { rank: 2, ran: &[], blocked: &[] }]);
    let names = |what| {
        let of_kind = events.iter().filter(move |event| event["name"] == what);
        of_kind.map(|event| event["args"]["name"].as_str().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(names("process_name"), ["rank 2"]);
    assert_eq!(names("thread_name"), ["compute: the trainer's waits", "reduce", "optim"]);
    assert!(parse(&[]).is_empty());
}
