//! A pause by the host, which is neither a reset nor a register.

use super::*;

fn position(function: &Plain) -> u16 {
    function.run.as_ref().unwrap().queues()[1].1.lock().next_avail()
}

#[test]
fn a_pause_stops_the_queues_where_they_stand_and_changes_no_register() {
    let mut function = threaded();
    driver(&mut function).init();
    wait("the worker is kicked when it starts", || kicks(&function) == 1);
    driver(&mut function).enable_msix(4);
    let before = image(&function);
    for _ in 0..2 {
        function.pause();
        assert!(!function.is_running());
    }
    assert_eq!((join(&mut function), image(&function)), (1, before));
    let mut doorbells = Vec::new();
    function.doorbells(Reach::Device, &mut doorbells);
    assert!(doorbells.is_empty());
    let stood = position(&function);
    assert!(stood >= 1);
    function.resume();
    function.resume();
    wait("the worker is kicked when it starts again", || kicks(&function) == 2);
    assert_eq!(function.device().starts, 2);
    let _ = driver(&mut function).set_bus_master(false);
    join(&mut function);
    assert_eq!(position(&function), stood + 1);
}

#[test]
fn what_happens_during_a_pause_counts_at_its_end() {
    let mut function = idle();
    function.pause();
    assert_eq!(driver(&mut function).init(), 15);
    assert_eq!((function.is_running(), function.device().starts), (false, 0));
    let _ = driver(&mut function).set_bus_master(false);
    function.resume();
    assert!(!function.is_running(), "without Bus Master");
    function.pause();
    let _ = driver(&mut function).set_bus_master(true);
    assert!(!function.is_running());
    function.resume();
    assert!(function.is_running());
    function.pause();
    let _ = driver(&mut function).set_status(0);
    function.resume();
    assert_eq!((function.is_running(), function.device().starts), (false, 1));
}
