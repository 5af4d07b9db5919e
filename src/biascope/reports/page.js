// A slider names a set of frames; the frame whose number it shows is visible, the others are hidden.
document.querySelectorAll('input[data-frames]').forEach(function(s){
  var frames=document.querySelectorAll('[data-set="'+s.dataset.frames+'"]'),
    out=document.getElementById(s.dataset.frames+'-out');
  function show(){frames.forEach(function(f){f.hidden=f.dataset.frame!==s.value});
    if(out){out.textContent=s.value}}
  s.addEventListener('input',show);show();
});
// The ledger: narrow the cards by what they are marked with, and by words.
(function(){
  var filters=document.querySelectorAll('[data-filter]');
  function narrow(){
    var want={};filters.forEach(function(f){want[f.dataset.filter]=f.value.toLowerCase()});
    document.querySelectorAll('.claim').forEach(function(card){
      card.hidden=Object.keys(want).some(function(key){
        return want[key]&&(key==='words'?card.textContent.toLowerCase().indexOf(want[key])<0:card.dataset[key]!==want[key]);
      });
    });
    document.querySelectorAll('section').forEach(function(section){
      var cards=section.querySelectorAll('.claim');
      section.hidden=cards.length>0&&section.querySelectorAll('.claim:not([hidden])').length===0;
    });
  }
  filters.forEach(function(f){f.addEventListener('input',narrow)});
})();
// Values under the pointer: each drawing says where its axes are and what it shows (figures.hover).
document.querySelectorAll('[data-hover]').forEach(function(box){
  var d=JSON.parse(box.dataset.hover),drawing=box.querySelector('svg'),
    tip=document.createElement('div'),dot=document.createElement('div');
  tip.className='tip';dot.className='dot';tip.hidden=dot.hidden=true;box.append(tip,dot);
  function number(v){return v===null?'not measured':Math.abs(v)>=1e5||(v!==0&&Math.abs(v)<1e-3)?v.toExponential(2):String(+v.toPrecision(4))}
  function place(axis,v){var a=axis[0],b=axis[1];if(axis[2]){a=Math.log(a);b=Math.log(b);v=Math.log(v)}return (v-a)/(b-a)}
  function nearest(px,py,w,h){ // px, py in 0..1 inside the axes, from the lower left
    var best=null,least=Infinity;
    d.series.forEach(function(s){for(var i=0;i<s[1].length;i++){
      var x=place(d.x,s[1][i]),y=place(d.y,(s[3]||s[2])[i]),
        far=(d.by==='y'?0:Math.pow((x-px)*w,2)*(d.by?1:4))+(d.by==='x'?0:Math.pow((y-py)*h,2));
      if(far<least){least=far;best=[x,y,s[0],s[1][i],s[2][i],d.names[s[3]?2:1]]}
    }});
    return best;
  }
  function show(event){
    var r=drawing.getBoundingClientRect(),w=d.box[2]*r.width,h=d.box[3]*r.height,
      px=(event.clientX-r.left-d.box[0]*r.width)/w,py=1-(event.clientY-r.top-d.box[1]*r.height)/h,x,y,text;
    if(px<-.03||px>1.03||py<-.03||py>1.03){return hide()}
    if(d.cells){
      var c=d.cells,i=Math.min(c[0].length-1,Math.max(0,Math.floor(px*c[0].length))),
        j=Math.min(c[1].length-1,Math.max(0,Math.floor(py*c[1].length)));
      x=(i+.5)/c[0].length;y=(j+.5)/c[1].length;
      text=d.names[2]+' '+number(c[2][j][i])+' at '+d.names[0]+' '+number(c[0][i])+', '+d.names[1]+' '+number(c[1][j]);
    }else{
      var p=nearest(px,py,w,h);if(!p){return hide()}
      x=p[0];y=p[1];
      text=d.by==='y'?p[2]+': '+d.names[0]+' '+number(p[3])
        :(p[2]?p[2]+': ':'')+d.names[0]+' '+number(p[3])+', '+p[5]+' '+number(p[4]);
    }
    var left=d.box[0]*r.width+x*w,top=d.box[1]*r.height+(1-y)*h;
    dot.style.left=left+'px';dot.style.top=top+'px';
    tip.textContent=text;tip.hidden=dot.hidden=false;
    tip.style.top=(top>r.height/2?top-tip.offsetHeight-10:top+12)+'px';
    tip.style.left=Math.max(0,Math.min(left-tip.offsetWidth/2,r.width-tip.offsetWidth))+'px';
  }
  function hide(){tip.hidden=dot.hidden=true}
  box.addEventListener('pointermove',show);box.addEventListener('pointerdown',show);box.addEventListener('pointerleave',hide);
});
