// A slider names a set of frames; the frame whose number it shows is visible, the others are hidden.
document.querySelectorAll('input[data-frames]').forEach(function(s){
  var frames=document.querySelectorAll('[data-set="'+s.dataset.frames+'"]'),
    out=document.getElementById(s.dataset.frames+'-out');
  function show(){frames.forEach(function(f){f.hidden=f.dataset.frame!==s.value});
    if(out){out.textContent=s.value}}
  s.addEventListener('input',show);show();
});
// The ledger: narrow the rows by verdict and words.
(function(){
  var filters=document.querySelectorAll('[data-filter]');
  function narrow(){
    var want={};filters.forEach(function(f){want[f.dataset.filter]=f.value.toLowerCase()});
    document.querySelectorAll('tr[data-verdict]').forEach(function(row){
      row.hidden=(want.verdict&&row.dataset.verdict!==want.verdict)||
        (want.words&&row.textContent.toLowerCase().indexOf(want.words)<0)||false;
    });
  }
  filters.forEach(function(f){f.addEventListener('input',narrow)});
})();
