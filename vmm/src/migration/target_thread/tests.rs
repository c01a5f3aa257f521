use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use vm_api::migration::MigrationRole;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::config::RestoreConfig;
use crate::migration::commands::{self, CommandReceiver};
use crate::migration::event_loop::EventLoop as _;
use crate::migration::handover::Outcome;
use crate::migration::handover::target::Action;
use crate::migration::loader::Loader;
use crate::migration::transport::Stream;
use crate::migration::wire::Kind;
use crate::migration::wire::{PAGE, Pages, Range};
use crate::telemetry::events::Events;
use crate::vm::host_limits::HostLimits;

/// A target in `phase`, whose guest has no disks, and its requests to the control thread.
fn at(phase: Phase) -> (MigrationTarget, Sender<TargetMessage>, CommandReceiver<TargetCommand>) {
    let (control, commands) = commands::queue().unwrap();
    let preparer = Preparer {
        given: RestoreConfig::default(),
        events: Events::default(),
        limits: HostLimits::default(),
        own_files: Vec::new(),
    };
    let progress = Progress::new(MigrationRole::Receiver, "listening");
    let (patience, fds) = (Duration::from_secs(60), Vec::new());
    let params = TargetParams { listener: None, tls: None, patience, preparer, fds, progress, control };
    let (own, inbox) = channel();
    let mut target = MigrationTarget::new(params, Cancel::new().unwrap(), own.clone(), inbox);
    for event in [
        Event::Accepted,
        Event::Greeted,
        Event::Offered,
        Event::Prepared,
        Event::Received,
        Event::Loaded,
        Event::Frame(Kind::Go),
    ] {
        target.machine.on(event);
    }
    assert_eq!(target.machine.phase(), phase);
    (target, own, commands)
}

/// Pages that arrive once the machine is being loaded are dropped.
#[test]
fn no_page_is_written_once_the_machine_is_loaded() {
    let (mut target, _inbox, _commands) = at(Phase::Locking);
    let memory = virtio_devices::GuestMap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    target.memory.set_memory(Arc::new(Loader::new(memory.clone())), 1);
    let (mut source, own) = UnixStream::pair().unwrap();
    target.memory.add(0, Stream::Unix(own));
    target.memory.start(&target.report.progress, &target.tasks);
    let mut send = |page: u64, value: u8| {
        let mut pages = Pages::default();
        assert!(pages.push(Range { start: page * PAGE, len: PAGE as u32, is_zero: false }));
        source.write_all(&pages.bytes()).and_then(|()| source.write_all(&[value; PAGE as usize]))
    };
    let has = |page: u64| memory.read_obj::<u8>(GuestAddress(page * PAGE)).unwrap();
    send(1, 7).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while has(1) != 7 {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    target.perform(Action::LoadState);
    // Without the receiving thread, pages have no reader.
    let sent: Vec<_> = (2..10).map(|page| send(page, 7)).collect();
    assert!(sent.iter().any(Result::is_err), "{sent:?}");
    assert!((2..10).all(|page| has(page) == 0));
}

/// `vmm.shutdown` blocks the control thread, which serves no requests, until the target's thread ends.
#[test]
fn quit_while_locking_does_not_wait_for_the_start() {
    let (target, inbox, commands) = at(Phase::Locking);
    let (done, ends) = channel();
    let runs = thread::spawn(move || {
        target.run();
        let _ = done.send(());
    });
    for message in [
        TargetMessage::Control(TargetReply::Cancel),
        TargetMessage::Control(TargetReply::Quit),
        TargetMessage::LocksTaken(Ok(())),
    ] {
        inbox.send(message).unwrap();
    }
    ends.recv_timeout(Duration::from_secs(10)).unwrap();
    runs.join().unwrap();
    let sent: Vec<_> = std::iter::from_fn(|| commands.take()).collect();
    assert!(!sent.iter().any(|command| matches!(command, TargetCommand::StartGuest)));
    let Some(TargetCommand::Report(Outcome::Failed, Some(why))) = sent.last() else { panic!("no report") };
    assert_eq!(why, QUITS);
}
