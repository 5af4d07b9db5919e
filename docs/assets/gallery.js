// The gallery: narrow the runs by what they are marked with, and by words.
(function () {
  var gallery = document.querySelector('.gallery');
  if (!gallery) { return; }
  var picks = gallery.querySelectorAll('[data-pick]'), runs = gallery.querySelectorAll('.run');
  function narrow() {
    var left = 0;
    runs.forEach(function (run) {
      run.hidden = Array.prototype.some.call(picks, function (pick) {
        var want = pick.value;
        if (!want) { return false; }
        if (pick.dataset.pick === 'words') { return run.textContent.toLowerCase().indexOf(want.toLowerCase()) < 0; }
        return run.dataset[pick.dataset.pick].split('|').indexOf(want) < 0;
      });
      left += run.hidden ? 0 : 1;
    });
    gallery.querySelectorAll('.runs-of').forEach(function (part) { part.hidden = !part.querySelector('.run:not([hidden])'); });
    gallery.querySelector('output').textContent = left === 1 ? '1 run' : left + ' runs';
  }
  picks.forEach(function (pick) { pick.addEventListener('input', narrow); });
  narrow(); // a browser keeps what was chosen when the page is loaded again
})();
