//! The source's thread with targets that fail.

use std::io::Read as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vm_api::migration::MigrationRole;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::dirty::{DirtySource, PageSet};
use crate::migration::commands::{self, CommandReceiver, StoppedGuest};
use crate::migration::handover::Outcome;
use crate::migration::incoming::{Incoming, Item};
use crate::migration::wire::{Frame, Kind};
use std::time::Instant;
use virtio_devices::StorageLocks;

/// Guest memory in bytes.
const MEMORY: usize = 8 << 20;

fn memory() -> GuestMap {
    let memory = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    memory.write_slice(&vec![0xa5; MEMORY], GuestAddress(0)).unwrap();
    memory
}

/// Parameters of a migration to the socket in `folder`, with these options.
fn params(folder: &Path, options: &str) -> (SourceParams, CommandReceiver<SourceCommand>) {
    let url = format!("unix:{}", folder.join("socket").display());
    let config: SendMigration = format!("destination_url={url},{options}").parse().unwrap();
    let (control, commands) = commands::queue().unwrap();
    let params = SourceParams {
        address: Address::parse("destination_url", &url).unwrap(),
        config,
        tls: None,
        offer: b"{}".to_vec(),
        passed: None,
        memory: memory(),
        discarded: Discarded::default(),
        progress: Progress::new(MigrationRole::Sender, "connecting"),
        control,
    };
    (params, commands)
}

/// Writer that has written all of memory again when the guest is paused.
struct Writes {
    collected: usize,
}

impl DirtySource for Writes {
    fn name(&self) -> &'static str {
        "the test writes"
    }

    fn start(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn collect(&mut self, pages: &mut PageSet) -> io::Result<()> {
        self.collected += 1;
        if self.collected > 1 {
            *pages = PageSet::all(&memory());
        }
        Ok(())
    }

    fn stop(&mut self) {}
}

/// A target that greets after `rtt`, creates any VM, sends keepalives, and receives pages slowly once `is_slow`.
fn serve(listener: &UnixListener, rtt: Duration, is_slow: &AtomicBool) {
    let (control, _) = listener.accept().unwrap();
    let mut incoming = Incoming::new(&control);
    let greeting = incoming.greeting().unwrap();
    let say = |bytes: &[u8]| _ = io::Write::write_all(&mut &control, bytes);
    thread::sleep(rtt);
    say(&greeting.bytes());
    let (pages, _) = listener.accept().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| drain(&pages, is_slow));
        while let Ok(Item::Frame(frame)) = incoming.receive() {
            match frame.kind() {
                Kind::Keepalive => say(&Frame::Keepalive.bytes()),
                Kind::Offer => say(&Frame::Prepared.bytes()),
                _ => {}
            }
        }
    });
}

fn drain(mut pages: &UnixStream, is_slow: &AtomicBool) {
    let mut bytes = vec![0; 16 << 10];
    while pages.read(&mut bytes).is_ok_and(|count| count > 0) {
        if is_slow.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Requests to the control thread, and the final report.
#[derive(Debug, Default)]
struct Commanded {
    stopped: bool,
    resumed: bool,
    end: Option<(Outcome, String)>,
}

/// Runs the control thread until the migration is over.
fn control(source: &SourceHandle, commands: &CommandReceiver<SourceCommand>, is_slow: &AtomicBool) -> Commanded {
    let mut commanded = Commanded::default();
    let until = Instant::now() + Duration::from_secs(60);
    while commanded.end.is_none() {
        assert!(Instant::now() < until, "{commanded:?}");
        match commands.take() {
            Some(SourceCommand::FindWriters) => {
                let writers: Vec<Box<dyn DirtySource>> = vec![Box::new(Writes { collected: 0 })];
                source.send(SourceReply::Writers(Ok(writers), StorageLocks::default(), 1));
            }
            Some(SourceCommand::StopGuest) => {
                commanded.stopped = true;
                is_slow.store(true, Ordering::SeqCst);
                let machine = include_str!("../../vm/saved/golden/machine_state-1.json");
                let machine = Box::new(serde_json::from_str(machine).unwrap());
                let (locks, stateful, stop) = (StorageLocks::default(), Vec::new(), Duration::ZERO);
                source.send(SourceReply::Stopped(Ok(StoppedGuest { machine, locks, stateful, stop })));
            }
            Some(SourceCommand::ResumeGuest) => commanded.resumed = true,
            Some(SourceCommand::Report(outcome, why)) => commanded.end = Some((outcome, why.unwrap_or_default())),
            Some(SourceCommand::ReleaseGuest) => source.send(SourceReply::GuestReleased(None)),
            Some(SourceCommand::Throttle(_) | SourceCommand::PassStarted(_)) => {}
            None => thread::sleep(Duration::from_millis(2)),
        }
    }
    commanded
}

/// Result of a migration to a target that receives pages slowly, from the start or once the guest is paused.
fn sent_slowly(is_slow: bool, options: &str) -> (Commanded, Duration) {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (params, commands) = params(folder.path(), options);
    let is_slow = AtomicBool::new(is_slow);
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, Duration::ZERO, &is_slow));
        let began = Instant::now();
        let source = SourceHandle::start(params).unwrap();
        let commanded = control(&source, &commands, &is_slow);
        (commanded, began.elapsed())
    })
}

#[test]
fn first_pass_longer_than_the_timeout_fails_the_migration() {
    let (commanded, took) = sent_slowly(true, "timeout_s=1");
    let (outcome, why) = commanded.end.unwrap();
    assert_eq!(outcome, Outcome::Failed);
    assert_eq!(why, "after timeout_s=1, the memory has not been copied once: the target receives it too slowly");
    assert!(!commanded.stopped && took < Duration::from_secs(30), "{took:?}");
}

#[test]
fn guest_paused_far_beyond_its_goal_resumes_at_the_source() {
    let (commanded, took) = sent_slowly(false, "downtime_ms=300");
    let (outcome, why) = commanded.end.unwrap();
    assert_eq!((outcome, commanded.resumed), (Outcome::Failed, true));
    assert_eq!(why, "the target or this host took too long (finishing)");
    assert!(commanded.stopped && took < Duration::from_secs(20), "{took:?}");
}

/// A listener at the socket of `folder` whose backlog is full.
fn full(folder: &Path) -> (UnixListener, UnixStream) {
    let path = folder.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    (listener, UnixStream::connect(&path).unwrap())
}

/// Cancels a migration. Returns its result, and the time until the end.
fn cancelled(source: &SourceHandle, commands: &CommandReceiver<SourceCommand>) -> (Outcome, String, Duration) {
    let began = Instant::now();
    source.send(SourceReply::Cancel);
    let (outcome, why) = control(source, commands, &AtomicBool::new(false)).end.unwrap();
    (outcome, why, began.elapsed())
}

#[test]
fn cancel_ends_a_connection_attempt_that_is_not_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let _full = full(folder.path());
    let (params, commands) = params(folder.path(), "downtime_ms=300");
    let source = SourceHandle::start(params).unwrap();
    thread::sleep(Duration::from_millis(200));
    let (outcome, why, took) = cancelled(&source, &commands);
    assert_eq!((outcome, why.as_str()), (Outcome::Cancelled, "cancelled (vm.cancel-migration)"));
    let began = Instant::now();
    drop(source);
    assert!(took + began.elapsed() < Duration::from_secs(6), "{took:?}");
}

/// The target accepts no further connection while it receives keepalives.
#[test]
fn source_sends_keepalives_and_takes_a_cancel_while_connecting() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let (params, commands) = params(folder.path(), "downtime_ms=300");
    let source = SourceHandle::start(params).unwrap();
    let (control, _) = listener.accept().unwrap();
    let _fills = UnixStream::connect(folder.path().join("socket")).unwrap();
    let mut incoming = Incoming::new(&control);
    let greeting = incoming.greeting().unwrap();
    io::Write::write_all(&mut &control, &greeting.bytes()).unwrap();
    control.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let Item::Frame(Frame::Keepalive) = incoming.receive().unwrap() else { panic!("no keepalive") };
    let (outcome, _, took) = cancelled(&source, &commands);
    assert_eq!(outcome, Outcome::Cancelled);
    let said = std::iter::repeat_with(|| incoming.receive().unwrap())
        .find(|item| !matches!(item, Item::Frame(Frame::Keepalive)));
    assert!(matches!(said, Some(Item::Frame(Frame::Cancel))), "no cancel");
    let began = Instant::now();
    drop(source);
    assert!(took + began.elapsed() < Duration::from_secs(6), "{took:?}");
}

#[test]
fn the_estimate_includes_the_time_of_the_greeting() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (params, commands) = params(folder.path(), "downtime_ms=2000");
    let progress = params.progress.clone();
    let is_slow = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, Duration::from_millis(300), &is_slow));
        let source = SourceHandle::start(params).unwrap();
        loop {
            match commands.take() {
                Some(SourceCommand::FindWriters) => {
                    let writers: Vec<Box<dyn DirtySource>> = vec![Box::new(Writes { collected: 0 })];
                    source.send(SourceReply::Writers(Ok(writers), StorageLocks::default(), 5));
                }
                Some(SourceCommand::StopGuest) => break,
                Some(SourceCommand::Report(outcome, why)) => panic!("{outcome:?}: {why:?}"),
                _ => thread::sleep(Duration::from_millis(2)),
            }
        }
        // Two round trips, 10 ms for one function, 4 for 4 more.
        let estimate = progress.shown().estimated_downtime_ms.unwrap();
        assert!(estimate >= 614, "{estimate}");
    });
}

/// A backend whose dirty log starts slowly.
struct Hesitates {
    resumes: Receiver<()>,
    stopped: Arc<AtomicBool>,
}

impl DirtySource for Hesitates {
    fn name(&self) -> &'static str {
        "the test hesitates"
    }

    fn start(&mut self) -> io::Result<()> {
        let _ = self.resumes.recv_timeout(Duration::from_secs(30));
        Ok(())
    }

    fn collect(&mut self, _pages: &mut PageSet) -> io::Result<()> {
        Ok(())
    }

    fn stop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
    }
}

#[test]
fn cancel_while_backends_start_logging_waits_for_their_logs() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (params, commands) = params(folder.path(), "downtime_ms=300");
    let (resume, resumes) = std::sync::mpsc::channel();
    let stopped = Arc::new(AtomicBool::new(false));
    let source = SourceHandle::start(params).unwrap();
    let (target, _) = listener.accept().unwrap();
    let mut incoming = Incoming::new(&target);
    let greeting = incoming.greeting().unwrap();
    io::Write::write_all(&mut &target, &greeting.bytes()).unwrap();
    let _pages = listener.accept().unwrap();
    target.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut until = |is_it: fn(&Frame) -> bool| {
        std::iter::repeat_with(|| incoming.receive().unwrap())
            .find(|item| matches!(item, Item::Frame(frame) if is_it(frame)))
    };
    until(|frame| frame.kind() == Kind::Offer);
    io::Write::write_all(&mut &target, &Frame::Prepared.bytes()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !matches!(commands.take(), Some(SourceCommand::FindWriters)) {
        assert!(Instant::now() < deadline, "the source does not look for writers");
        thread::sleep(Duration::from_millis(2));
    }
    let writer = Hesitates { resumes, stopped: Arc::clone(&stopped) };
    source.send(SourceReply::Writers(Ok(vec![Box::new(writer)]), StorageLocks::default(), 1));
    source.send(SourceReply::Cancel);
    until(|frame| matches!(frame, Frame::Cancel));
    thread::sleep(Duration::from_millis(100));
    assert!(commands.take().is_none(), "ended while a backend may begin to log");
    resume.send(()).unwrap();
    let commanded = control(&source, &commands, &AtomicBool::new(false));
    assert_eq!((commanded.end.unwrap().0, stopped.load(Ordering::SeqCst)), (Outcome::Cancelled, true));
}

/// The guest's writes to memory that is not sent would be lost.
#[test]
fn a_guest_that_writes_what_is_discarded_stays_at_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let (mut params, commands) = params(folder.path(), "downtime_ms=300");
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let mapping = Arc::new(virtio_devices::FileMapping::new(&file, 1 << 20, true).unwrap());
    params.discarded.0.push(("--pmem id=p".to_string(), Arc::clone(&mapping)));
    let is_slow = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, Duration::ZERO, &is_slow));
        let source = SourceHandle::start(params).unwrap();
        loop {
            match commands.take() {
                Some(SourceCommand::FindWriters) => {
                    let writers: Vec<Box<dyn DirtySource>> = vec![Box::new(Writes { collected: 0 })];
                    source.send(SourceReply::Writers(Ok(writers), StorageLocks::default(), 1));
                }
                Some(SourceCommand::StopGuest) => break,
                Some(SourceCommand::Report(outcome, why)) => panic!("{outcome:?}: {why:?}"),
                _ => thread::sleep(Duration::from_millis(2)),
            }
        }
        // SAFETY: the first byte is mapped, and nothing has a reference to it.
        unsafe { mapping.address().write_volatile(0) };
        let machine = include_str!("../../vm/saved/golden/machine_state-1.json");
        let machine = Box::new(serde_json::from_str(machine).unwrap());
        let (locks, stateful, stop) = (StorageLocks::default(), Vec::new(), Duration::ZERO);
        source.send(SourceReply::Stopped(Ok(StoppedGuest { machine, locks, stateful, stop })));
        let commanded = control(&source, &commands, &AtomicBool::new(false));
        let (outcome, why) = commanded.end.unwrap();
        assert_eq!((outcome, commanded.resumed), (Outcome::Failed, true));
        assert!(why.starts_with("--pmem id=p: discard_writes=on: what the guest has written"), "{why}");
    });
}
