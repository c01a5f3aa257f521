//! Live migrations between two real programs, one of which is killed, disconnected or cancelled at each of their
//! messages.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::migration::{dots, progress, receive, source, url, wait_for_state};
use crate::migration_wire::{Point, Then, Wire};
use crate::rig::client::Client;
use crate::rig::vmm::{Vmm, wait_for};

/// Failure at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Harm {
    /// The source is killed, as by `kill -9`.
    KillsSource,
    /// The target is.
    KillsTarget,
    /// The connections end.
    Cuts,
    /// They end in the middle of a frame.
    Halves,
    /// A client ends the migration at the source.
    CancelsSource,
    /// A client ends it at the target.
    CancelsTarget,
}

/// Failures that the source survives.
pub(crate) const TO_OTHERS: [Harm; 5] =
    [Harm::KillsTarget, Harm::Cuts, Harm::Halves, Harm::CancelsSource, Harm::CancelsTarget];
/// Time limit for a side to decide (acceptance A8), and for a cancelled guest to resume.
const DECISION: Duration = Duration::from_secs(30);

/// A target, and a migration stopped at a point.
pub(crate) struct Moving {
    pub target: Vmm,
    pub there: Client,
    pub wire: Wire,
}

impl Moving {
    /// Sends the guest of `source` up to the frame at `point`.
    pub(crate) fn to(source: &Vmm, client: &mut Client, point: Point) -> Self {
        Self::over(source, client, point, Wire::new)
    }

    /// The same, over such a wire.
    pub(crate) fn over(
        source: &Vmm,
        client: &mut Client,
        point: Point,
        wire: impl FnOnce(&Path, &Path, &[Point]) -> Wire,
    ) -> Self {
        let target = Vmm::start();
        let there = receive(&target, &url(&target));
        let path = source.files.path("wire");
        let wire = wire(&path, &target.files.path("migration"), &[point]);
        send_over(client, &path);
        wire.reaches();
        Self { target, there, wire }
    }

    /// Applies a failure to another part than the source.
    pub(crate) fn harm(&mut self, harm: Harm, client: &mut Client) {
        match harm {
            Harm::KillsSource => {}
            Harm::KillsTarget => {
                self.target.kill();
                self.wire.goes(Then::IsCut);
            }
            Harm::Cuts => self.wire.goes(Then::IsCut),
            Harm::Halves => self.wire.goes(Then::IsHalf),
            Harm::CancelsSource => drop(client.put("vm.cancel-migration").expect(204)),
            Harm::CancelsTarget => drop(self.there.put("vm.cancel-migration").expect(204)),
        }
    }
}

fn send_over(client: &mut Client, path: &Path) {
    let body = json!({"destination_url": format!("unix:{}", path.display())});
    client.put_json("vm.send-migration", &body).expect(204);
}

/// Asserts that the guest counts on one side, and not on the other.
pub(crate) fn assert_runs(here: &Vmm, not_there: &Vmm, what: &str) {
    let (before, other) = (dots(here), dots(not_there));
    wait_for(what, || dots(here) > before + 1);
    assert_eq!(dots(not_there), other, "{what}: it runs at both places");
}

/// Asserts that the guest counts on none of these sides, long enough to detect it.
fn assert_stands<const N: usize>(places: [&Vmm; N], what: &str) {
    let before = places.map(dots);
    thread::sleep(Duration::from_millis(400));
    assert_eq!(places.map(dots), before, "{what}: it runs");
}

/// End of the migration at the source, within the time limit.
pub(crate) fn ended(client: &mut Client) -> Value {
    let began = Instant::now();
    let mut last = Value::Null;
    wait_for("the end", || {
        last = progress(client);
        last["state"] != "active"
    });
    assert!(began.elapsed() < DECISION, "it took {:?}: {last}", began.elapsed());
    last
}

#[test]
fn any_harm_before_go_leaves_the_guest_only_at_its_source() {
    let (source, mut client) = source();
    let mut points = 0;
    let mut slowest = Duration::ZERO;
    let files = source.open_files();
    for point in Point::BEFORE_GO {
        for harm in TO_OTHERS {
            let mut moving = Moving::to(&source, &mut client, point);
            let began = Instant::now();
            moving.harm(harm, &mut client);
            let last = ended(&mut client);
            if harm == Harm::CancelsSource {
                slowest = slowest.max(began.elapsed());
            }
            let expected: &[&str] = match harm {
                Harm::CancelsSource => &["cancelled"],
                // The reason for the lost connection may be known, or not yet.
                Harm::CancelsTarget => &["cancelled", "failed"],
                _ => &["failed"],
            };
            assert!(expected.contains(&last["state"].as_str().unwrap()), "{point:?} {harm:?}: {last}");
            moving.wire.goes(Then::IsCut);
            if harm != Harm::KillsTarget {
                if point == Point::BEFORE_GO[0] {
                    // No source has reached the target: it waits for another.
                    moving.there.put("vm.cancel-migration");
                }
                wait_for("the target", || progress(&mut moving.there)["state"] != "active");
                moving.there.get("vm.info").expect(404);
            }
            assert_runs(&source, &moving.target, &format!("{point:?} {harm:?}: {last}"));
            points += 1;
        }
    }
    println!("{points} points; from a cancel to its outcome at most {slowest:?}");
    wait_for("its files", || source.open_files() <= files);
    // Now it migrates.
    let target = Vmm::start();
    let mut there = receive(&target, &url(&target));
    client.put_json("vm.send-migration", &json!({"destination_url": url(&target)})).expect(204);
    wait_for_state(&mut there, "finished");
    assert_runs(&target, &source, "the migration without harm");
}

#[test]
fn a_source_killed_before_go_leaves_no_guest_at_the_target() {
    for point in [&Point::BEFORE_GO[..], &[Point::GO]].concat() {
        let (mut source, mut client) = source();
        let mut moving = Moving::to(&source, &mut client, point);
        source.kill();
        moving.wire.goes(Then::IsCut);
        let began = Instant::now();
        // Before its greeting, a peer is not a source, and the target waits for another.
        if point == Point::BEFORE_GO[0] {
            assert_eq!(progress(&mut moving.there)["phase"], "listening");
            continue;
        }
        wait_for_state(&mut moving.there, "failed");
        assert!(began.elapsed() < DECISION);
        moving.there.get("vm.info").expect(404);
        assert_stands([&moving.target], &format!("{point:?}"));
    }
}

#[test]
fn after_a_lost_go_neither_side_runs_the_guest_until_forced() {
    for harm in [Harm::KillsTarget, Harm::Cuts, Harm::Halves] {
        let (source, mut client) = source();
        let mut moving = Moving::to(&source, &mut client, Point::GO);
        client.put("vm.cancel-migration").expect(204);
        moving.harm(harm, &mut client);
        assert_eq!(ended(&mut client)["state"], "unknown", "{harm:?}");
        assert_stands([&source, &moving.target], &format!("{harm:?}"));
        client.put_json("vm.resume", &json!({"force": true})).expect(204);
        wait_for("the source", || progress(&mut client)["state"] == "forced");
        assert_runs(&source, &moving.target, &format!("{harm:?}"));
    }
}

#[test]
fn after_a_lost_reply_to_go_only_the_target_runs_the_guest() {
    for harm in [Harm::Cuts, Harm::Halves, Harm::KillsSource] {
        let (mut source, mut client) = source();
        let mut moving = Moving::to(&source, &mut client, Point::RUNNING);
        if harm == Harm::KillsSource {
            source.kill();
            moving.wire.goes(Then::IsCut);
        } else {
            moving.harm(harm, &mut client);
            assert_eq!(ended(&mut client)["state"], "unknown", "{harm:?}");
        }
        wait_for_state(&mut moving.there, "finished");
        assert_runs(&moving.target, &source, &format!("{harm:?}"));
    }
}

#[test]
fn a_cancel_while_the_answer_to_go_is_on_its_way_comes_too_late() {
    for harm in [Harm::CancelsSource, Harm::CancelsTarget] {
        let (source, mut client) = source();
        let mut moving = Moving::to(&source, &mut client, Point::RUNNING);
        // The target may have no migration any longer.
        let (answer, expected) = match harm {
            Harm::CancelsSource => (client.put("vm.cancel-migration"), &[204][..]),
            _ => (moving.there.put("vm.cancel-migration"), &[204, 409][..]),
        };
        assert!(expected.contains(&answer.status), "{answer:?}");
        thread::sleep(Duration::from_millis(200));
        moving.wire.goes(Then::Passes);
        assert_eq!(ended(&mut client)["state"], "finished", "{harm:?}");
        wait_for_state(&mut moving.there, "finished");
        assert_runs(&moving.target, &source, &format!("{harm:?}"));
    }
}

#[test]
fn a_target_cancelled_while_go_is_under_way_returns_the_guest() {
    let (source, mut client) = source();
    let mut moving = Moving::to(&source, &mut client, Point::GO);
    moving.harm(Harm::CancelsTarget, &mut client);
    let last = ended(&mut client);
    assert_eq!(last["state"], "failed", "{last}");
    moving.wire.goes(Then::Passes);
    assert_runs(&source, &moving.target, "given back");
    moving.there.get("vm.info").expect(404);
}

#[test]
fn a_stalled_connection_ends_the_migration_a_slow_one_does_not() {
    let (source, mut client) = source();
    // The connection stays open, but nothing arrives: 8 s of silence.
    for point in [Point::Frame(2, 0), Point::Frame(6, 0)] {
        let moving = Moving::to(&source, &mut client, point);
        assert_eq!(ended(&mut client)["state"], "failed", "{point:?}");
        assert_runs(&source, &moving.target, &format!("{point:?}"));
    }
    // For a while.
    let mut moving = Moving::to(&source, &mut client, Point::Frame(6, 0));
    thread::sleep(Duration::from_secs(3));
    moving.wire.goes(Then::Passes);
    wait_for_state(&mut moving.there, "finished");
    assert_runs(&moving.target, &source, "a slow connection");
}
