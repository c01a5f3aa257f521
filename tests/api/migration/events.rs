//! Events of live migrations at both sides, from the request to the end, in their order.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::migration::peer::{Ends, Target};
use crate::migration::{config, dots, progress, receive, send, url, wait_for_state};
use crate::migration_wire::{Point, Then, Wire};
use crate::rig::client::Client;
use crate::rig::vmm::{BINARY, Vmm, wait_for};

/// A VMM that writes events, and keeps running without its guest.
pub(crate) fn telling() -> Vmm {
    let mut command = Command::new(BINARY);
    command.args(["--no-shutdown", "--event-monitor", "path=events"]);
    Vmm::of(command)
}

/// Such a VMM whose guest counts.
fn source() -> (Vmm, Client) {
    let vmm = telling();
    let client = vmm.boot_config(&config(&vmm));
    wait_for("the guest", || dots(&vmm) > 2);
    (vmm, client)
}

/// Events of the VM until `last`, without those of its boot.
fn told(vmm: &Vmm, last: &str) -> Vec<Value> {
    let mut events: Vec<Value> = Vec::new();
    wait_for(last, || {
        let text = fs::read_to_string(vmm.files.path("events")).unwrap_or_default();
        // The last line may be incomplete.
        events = serde_json::Deserializer::from_str(&text).into_iter().map_while(Result::ok).collect();
        events.last().is_some_and(|event| event["event"] == last)
    });
    events.retain(|event| event["source"] == "vm" && !["booting", "booted"].map(Value::from).contains(&event["event"]));
    events
}

/// The names of events, with a single one for the passes, whose numbers must count from 1.
fn names(events: &[Value]) -> String {
    let (mut names, mut passes): (Vec<&str>, u64) = (Vec::new(), 0);
    for event in events {
        let name = event["event"].as_str().unwrap();
        if name == "migration-memory-iteration" {
            passes += 1;
            assert_eq!(event["properties"], json!({"id": passes.to_string()}));
        }
        if names.last() != Some(&name) {
            names.push(name);
        }
    }
    names.join(" ")
}

/// Result and reason of a migration, from the event that reports it.
fn end<'a>(events: &'a [Value], name: &str) -> (&'a str, &'a str) {
    let event = events.iter().find(|event| event["event"] == name).unwrap();
    let [outcome, why] = ["outcome", "error"].map(|what| event["properties"][what].as_str().unwrap());
    assert!(!why.contains('\n'), "{why}");
    (outcome, why)
}

#[test]
fn a_migration_reports_events_from_its_request_to_the_shutdown() {
    let ((source, mut client), target) = (source(), telling());
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    let sent = wait_for_state(&mut client, "finished");
    wait_for_state(&mut there, "finished");
    let events = told(&source, "shutdown");
    assert_eq!(names(&events), "migration-started migration-memory-iteration migration-finished shutdown");
    let passes = events.iter().filter(|event| event["event"] == "migration-memory-iteration").count() as u64;
    // The passes while the guest ran, and the final one.
    assert_eq!(passes, sent["pass"].as_u64().unwrap() + 1, "{sent}");
    let events = told(&target, "migration-receive-finished");
    let expected = "migration-receive-ready migration-receive-started resumed migration-receive-finished";
    assert_eq!(names(&events), expected);
    let (finished, before) = events.split_last().unwrap();
    assert!(before.iter().all(|event| event["properties"].is_null()), "{events:?}");
    // The target reports it too: the source may have ended. It adds its own part to what the source has sent.
    let [here, source_stopped] = [there, client].map(|mut client| progress(&mut client)["downtime"].clone());
    let total = here["total_us"].as_u64().unwrap();
    assert_eq!(finished["properties"]["downtime_us"], total.to_string());
    let stopped =
        ["stop_us", "save_us", "send_us"].map(|part| source_stopped[part].as_u64().unwrap()).iter().sum::<u64>();
    assert!(total > stopped && total >= here["handover_us"].as_u64().unwrap(), "{here} {source_stopped}");
}

#[test]
fn a_cancelled_migration_is_reported_with_the_side_that_did_it() {
    let ((source, mut client), target) = (source(), telling());
    let mut there = receive(&target, &url(&target));
    let path = source.files.path("wire");
    // In the middle of the first pass.
    let wire = Wire::new(&path, &target.files.path("migration"), &[Point::Frame(3, 0)]);
    send(&mut client, &format!("unix:{}", path.display()));
    wire.reaches();
    client.put("vm.cancel-migration").expect(204);
    wait_for_state(&mut client, "cancelled");
    wait_for_state(&mut there, "cancelled");
    wire.goes(Then::IsCut);
    let events = told(&source, "migration-failed");
    assert_eq!(names(&events), "migration-started migration-memory-iteration migration-failed");
    assert_eq!(end(&events, "migration-failed"), ("cancelled", "cancelled (vm.cancel-migration)"));
    let events = told(&target, "migration-receive-failed");
    assert_eq!(names(&events), "migration-receive-ready migration-receive-started migration-receive-failed");
    assert_eq!(end(&events, "migration-receive-failed"), ("cancelled", "cancelled at the source"));
}

#[test]
fn a_failed_migration_reports_the_same_reason_at_both_sides() {
    let ((source, mut client), target) = (source(), telling());
    // The file for the guest's serial port cannot be created there.
    fs::create_dir(target.files.path("serial")).unwrap();
    let mut there = receive(&target, &url(&target));
    send(&mut client, &url(&target));
    wait_for_state(&mut client, "failed");
    wait_for_state(&mut there, "failed");
    let events = told(&source, "migration-failed");
    assert_eq!(names(&events), "migration-started migration-failed");
    let here = end(&events, "migration-failed");
    let events = told(&target, "migration-receive-failed");
    assert_eq!(names(&events), "migration-receive-ready migration-receive-started migration-receive-failed");
    let (outcome, why) = end(&events, "migration-receive-failed");
    assert_eq!((outcome, here), ("failed", ("failed", format!("the target: {why}").as_str())));
    assert!(why.contains("serial"), "{why}");
}

#[test]
fn an_unknown_outcome_is_reported_and_then_the_users_decision() {
    let (source, mut client) = source();
    let _target = Target::listen(&source.files.path("migration"), Ends::DiesAfterGo);
    send(&mut client, &url(&source));
    wait_for_state(&mut client, "unknown");
    let events = told(&source, "migration-unknown");
    assert_eq!(names(&events), "migration-started migration-memory-iteration migration-unknown");
    assert_eq!(end(&events, "migration-unknown").0, "unknown");
    client.put_json("vm.resume", &json!({"force": true})).expect(204);
    wait_for("the source", || progress(&mut client)["state"] == "forced");
    let events = told(&source, "migration-failed");
    let expected = "migration-started migration-memory-iteration migration-unknown migration-failed";
    assert_eq!(names(&events), expected);
    assert_eq!(end(&events, "migration-failed").0, "forced");
}
