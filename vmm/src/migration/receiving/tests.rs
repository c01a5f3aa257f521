use std::sync::mpsc::channel;
use std::thread;

use vm_api::migration::MigrationRole;

use super::*;
use crate::config::RestoreConfig;
use crate::migration::orders::{self, Orders};
use crate::telemetry::events::Events;
use crate::vm::host_limits::HostLimits;

/// A target that has come to `stage` of a guest without disks, and what it tells the control thread.
fn at(stage: Stage) -> (Conductor, Sender<Inbox>, Orders<TargetOrder>) {
    let (control, orders) = orders::pair().unwrap();
    let preparer = Preparer {
        given: RestoreConfig::default(),
        events: Events::default(),
        limits: HostLimits::default(),
        own_files: Vec::new(),
    };
    let progress = Progress::new(MigrationRole::Receiver, "listening");
    let (patience, fds) = (Duration::from_secs(60), Vec::new());
    let job = ReceiveJob { listener: None, tls: None, patience, preparer, fds, progress, control };
    let (own, inbox) = channel();
    let mut conductor = Conductor::new(job, Cancel::new().unwrap(), own.clone(), inbox);
    for event in [
        Event::Accepted,
        Event::Greeted,
        Event::Offered,
        Event::Prepared,
        Event::Received,
        Event::Loaded,
        Event::Heard(Kind::Go),
    ] {
        conductor.machine.on(event);
    }
    assert_eq!(conductor.machine.stage(), stage);
    (conductor, own, orders)
}

/// `vmm.shutdown` of a target waits for its conductor, whose control thread carries out nothing meanwhile.
#[test]
fn a_program_that_ends_while_locks_are_taken_does_not_wait_for_a_start() {
    let (conductor, inbox, orders) = at(Stage::Locking);
    let (done, ends) = channel();
    let runs = thread::spawn(move || {
        conductor.run();
        let _ = done.send(());
    });
    for heard in [Inbox::Control(TargetNote::Cancel), Inbox::Control(TargetNote::Quit), Inbox::Locked(Ok(()))] {
        inbox.send(heard).unwrap();
    }
    ends.recv_timeout(Duration::from_secs(10)).unwrap();
    runs.join().unwrap();
    let told: Vec<_> = std::iter::from_fn(|| orders.take()).collect();
    assert!(!told.iter().any(|order| matches!(order, TargetOrder::Start)));
    let Some(TargetOrder::Report(Outcome::Failed, Some(why))) = told.last() else { panic!("no report") };
    assert_eq!(why, QUITS);
}
